//! The dialects that have request bodies, and what each can say. One table, no `if`s elsewhere.

use crate::model::{Field, Spec, Value};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dialect {
    /// register_proc_info: a registry of specs.
    GseV1,
    /// operate_proc: the spec in every call.
    GseV2,
    /// manage_proc and operate_process.
    Job,
}

impl Dialect {
    pub const ALL: [Dialect; 3] = [Dialect::GseV1, Dialect::GseV2, Dialect::Job];

    pub fn name(self) -> &'static str {
        match self {
            Dialect::GseV1 => "gse-v1",
            Dialect::GseV2 => "gse-v2",
            Dialect::Job => "job",
        }
    }

    /// Does a body of this dialect have a place for the field?
    pub fn says(self, field: Field) -> bool {
        let (v1, v2, job) = match field {
            Field::ProcName
            | Field::SetupPath
            | Field::PidPath
            | Field::ConfigPath
            | Field::LogPath
            | Field::User
            | Field::ValueKey
            | Field::StartCmd
            | Field::StopCmd
            | Field::RestartCmd
            | Field::ReloadCmd
            | Field::KillCmd
            | Field::AutoType => (true, true, true),
            Field::Labels
            | Field::VersionCmd
            | Field::HealthCmd
            | Field::StartCheckSecs
            | Field::StopCheckSecs
            | Field::StartRetries
            | Field::StartInterval
            | Field::CrontabRule
            | Field::ReportId
            | Field::Configmap => (true, true, false),
            Field::OpTimeout => (false, true, true),
            Field::Cpu | Field::Mem => (true, false, true),
            Field::Fd | Field::Disk | Field::Net => (true, false, false),
            Field::ProcOwner
            | Field::FuncId
            | Field::InstanceId
            | Field::InstanceNum
            | Field::CycleTime
            | Field::StartCheckBeginTime
            | Field::StartCheckEndTime => (false, false, true),
            Field::Env | Field::StartMode => (false, false, false),
        };
        match self {
            Dialect::GseV1 => v1,
            Dialect::GseV2 => v2,
            Dialect::Job => job,
        }
    }

    /// The fields of a spec that are set, mean something, and cannot be said.
    pub fn unsaid(self, spec: &Spec) -> Vec<Field> {
        let default = Spec::default();
        let rows = spec.values().into_iter().zip(default.values());
        rows.filter(|((_, value), (_, default))| *value != Value::Unset && value != default)
            .map(|((field, _), _)| field)
            .filter(|field| !self.says(*field))
            .collect()
    }
}
