//! Stages of a launch: the step between clone and execve that failed, and its code in a report.

/// The step of a launch that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExecStage {
    Clone,
    /// Leaving the agent's descriptor table.
    Table,
    Session,
    Descriptors,
    Folder,
    User,
    MountNamespace,
    /// By the number of the resource.
    Ulimit(u8),
    OomScoreAdj,
    Nice,
    Capabilities,
    NoNewPrivs,
    Program,
    /// The process cannot write its pid file.
    PidFile,
    /// The process did not reach `execve` in time, and was killed.
    TimedOut,
}

impl ExecStage {
    const REPORTED: [ExecStage; 13] = [
        ExecStage::Session,
        ExecStage::Descriptors,
        ExecStage::Folder,
        ExecStage::User,
        ExecStage::Program,
        ExecStage::Table,
        ExecStage::MountNamespace,
        ExecStage::OomScoreAdj,
        ExecStage::Nice,
        ExecStage::Capabilities,
        ExecStage::NoNewPrivs,
        ExecStage::PidFile,
        ExecStage::Clone,
    ];
    /// Codes of the limits begin here, one per resource.
    const ULIMITS_FROM: u8 = 64;

    /// The byte by which a process of the launcher reports the stage.
    pub(super) fn code(self) -> u8 {
        match self {
            ExecStage::Ulimit(resource) => ExecStage::ULIMITS_FROM + resource,
            stage => ExecStage::REPORTED.iter().position(|one| *one == stage).unwrap_or_default() as u8,
        }
    }

    pub(super) fn of_code(code: u8) -> ExecStage {
        match code.checked_sub(ExecStage::ULIMITS_FROM) {
            Some(resource) => ExecStage::Ulimit(resource),
            None => ExecStage::REPORTED.get(usize::from(code)).copied().unwrap_or(ExecStage::Program),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_names_its_stage() {
        let limits = (0..16).map(ExecStage::Ulimit);
        for stage in ExecStage::REPORTED.into_iter().chain(limits) {
            assert_eq!(ExecStage::of_code(stage.code()), stage);
        }
        assert_eq!(ExecStage::of_code(63), ExecStage::Program);
    }
}
