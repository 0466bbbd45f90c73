//! Dialects of targets, and the fields that each supports. The only place that lists them.

use super::{Field, Spec};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dialect {
    /// register_proc_info: the target has a registry of specs.
    GseV1,
    /// operate_proc: every call carries the spec.
    GseV2,
    /// GSE 2.0 through the API gateway.
    GseApigw,
    /// manage_proc and operate_process.
    Job,
    /// The Abide gateway.
    Abide,
}

impl Dialect {
    pub const ALL: [Dialect; 5] =
        [Dialect::GseV1, Dialect::GseV2, Dialect::GseApigw, Dialect::Job, Dialect::Abide];
    /// The dialects with distinct request bodies.
    pub const BODIES: [Dialect; 3] = [Dialect::GseV1, Dialect::GseV2, Dialect::Job];

    pub fn name(self) -> &'static str {
        match self {
            Dialect::GseV1 => "gse-v1",
            Dialect::GseV2 => "gse-v2",
            Dialect::GseApigw => "gse-apigw",
            Dialect::Job => "job",
            Dialect::Abide => "abide",
        }
    }

    /// Whether the dialect can transmit the field.
    pub fn supports(self, field: Field) -> bool {
        let (v1, v2, apigw, job) = match field {
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
            | Field::AutoType => (true, true, true, true),
            Field::Labels
            | Field::VersionCmd
            | Field::HealthCmd
            | Field::StartCheckSecs
            | Field::StopCheckSecs
            | Field::StartRetries
            | Field::StartInterval
            | Field::CrontabRule
            | Field::ReportId
            | Field::Configmap => (true, true, true, false),
            Field::OpTimeout => (false, true, true, true),
            Field::Cpu | Field::Mem => (true, false, true, true),
            Field::Fd | Field::Disk | Field::Net => (true, false, true, false),
            Field::ProcOwner
            | Field::FuncId
            | Field::InstanceId
            | Field::InstanceNum
            | Field::CycleTime
            | Field::StartCheckBeginTime
            | Field::StartCheckEndTime => (false, false, false, true),
            Field::Env
            | Field::StartMode
            | Field::StopSignal
            | Field::StopTimeout
            | Field::ReloadSignal
            | Field::CrontabZone
            | Field::Health
            | Field::Restart
            | Field::Log
            | Field::Limits
            | Field::EnvFile
            | Field::Sandbox
            | Field::Hooks => (false, false, false, false),
        };
        match self {
            Dialect::GseV1 => v1,
            Dialect::GseV2 => v2,
            Dialect::GseApigw => apigw,
            Dialect::Job => job,
            Dialect::Abide => true,
        }
    }

    /// The fields of a spec that are set and that the dialect cannot transmit.
    pub fn unsupported_fields(self, spec: &Spec) -> Vec<Field> {
        Field::ALL.iter().copied().filter(|field| !self.supports(*field) && spec.is_set(*field)).collect()
    }
}
