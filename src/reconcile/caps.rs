//! Capabilities of a target, as data. The planner depends on these and never on the name of a dialect.

use crate::model::{Dialect, Field};

/// Capabilities of one kind of target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// For messages and for the supported fields.
    dialect: Dialect,
    /// register and unregister exist, and the registered spec survives the end of supervision.
    pub registry: bool,
    /// start, restart, reload, host and stop use the registered spec, not one that they are sent.
    pub operates_on_registered_spec: bool,
    /// restart and reload also register the new spec.
    pub restart_registers_spec: bool,
    /// stop and unhost must be sent the spec of the process or of its supervision.
    pub stop_needs_old: bool,
    /// A restart needs a restart_cmd, a stop needs a stop_cmd or kill_cmd.
    pub needs_commands: bool,
    /// Observations contain labels, and thereby the owner of an instance.
    pub reads_labels: bool,
    /// Observations contain the registered and the live spec.
    pub reads_specs: bool,
    pub reads_health: bool,
    /// Maximum age of a list.
    pub lag_secs: u64,
    pub moves: Moves,
    /// The fields that can hold the schedule of a periodic process.
    pub schedules: &'static [Field],
}

/// Method by which a target renames a running process without a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
    /// Not supported: the instance is held.
    Held,
    /// Unsupervise under the old name, supervise under the new one.
    Rehost,
    /// No operation: only Abide uses the names.
    Nothing,
    /// The engine renames the instance and registers the new spec.
    Rename,
}

const FIVE_MINUTES: u64 = 300;

impl Caps {
    pub const GSE_V1: Caps = Caps {
        dialect: Dialect::GseV1,
        registry: true,
        operates_on_registered_spec: true,
        restart_registers_spec: false,
        stop_needs_old: false,
        needs_commands: true,
        reads_labels: true,
        reads_specs: false,
        reads_health: false,
        lag_secs: FIVE_MINUTES,
        moves: Moves::Held,
        schedules: &[Field::CrontabRule],
    };

    pub const GSE_V2: Caps = Caps {
        dialect: Dialect::GseV2,
        registry: false,
        operates_on_registered_spec: false,
        restart_registers_spec: false, // not documented: assuming so costs one idempotent host, never supervision with an old spec
        stop_needs_old: true,
        needs_commands: true,
        reads_labels: true,
        reads_specs: false,
        reads_health: false,
        lag_secs: FIVE_MINUTES,
        moves: Moves::Rehost,
        schedules: &[Field::CrontabRule],
    };

    /// GSE 2.0 through the API gateway: the same operations, a few more fields.
    pub const GSE_APIGW: Caps = Caps { dialect: Dialect::GseApigw, ..Caps::GSE_V2 };

    pub const JOB: Caps = Caps {
        dialect: Dialect::Job,
        reads_labels: false,
        lag_secs: 0,
        moves: Moves::Nothing,
        schedules: &[Field::CycleTime],
        ..Caps::GSE_V2
    };

    pub const LOCAL: Caps = Caps {
        dialect: Dialect::Abide,
        registry: true,
        operates_on_registered_spec: false,
        restart_registers_spec: true,
        stop_needs_old: false,
        needs_commands: false,
        reads_labels: true,
        reads_specs: true,
        reads_health: true,
        lag_secs: 0,
        moves: Moves::Rename,
        schedules: &[Field::CrontabRule, Field::CycleTime],
    };

    /// By the names that `--caps` accepts.
    pub const ALL: [(&str, Caps); 5] = [
        ("gse-v1", Caps::GSE_V1),
        ("gse-v2", Caps::GSE_V2),
        ("gse-apigw", Caps::GSE_APIGW),
        ("job", Caps::JOB),
        ("local", Caps::LOCAL),
    ];

    pub fn of(dialect: Dialect) -> Caps {
        match dialect {
            Dialect::GseV1 => Caps::GSE_V1,
            Dialect::GseV2 => Caps::GSE_V2,
            Dialect::GseApigw => Caps::GSE_APIGW,
            Dialect::Job => Caps::JOB,
            Dialect::Abide => Caps::LOCAL,
        }
    }

    pub fn name(&self) -> &'static str {
        self.dialect.name()
    }

    /// Whether the target supports the field.
    pub fn supports_field(&self, field: Field) -> bool {
        self.dialect.supports(field)
    }
}
