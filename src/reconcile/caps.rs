//! What a target can do, as data. The core asks these questions and never for a dialect's name.

use crate::model::{Dialect, Field};

/// The abilities of one kind of target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// For messages, and to ask what it can say.
    dialect: Dialect,
    /// register and unregister exist, and what was given stays when the guard goes.
    pub registry: bool,
    /// start, restart, reload, host and stop work with the spec that was given, not with one they are sent.
    pub operates_on_registered_spec: bool,
    /// restart and reload also tell the engine the new spec.
    pub restart_registers_spec: bool,
    /// stop and unhost must be sent the spec that the process or the guard has.
    pub stop_needs_old: bool,
    /// Without a restart_cmd there is no restart, without a stop_cmd or kill_cmd no stop.
    pub needs_commands: bool,
    /// Labels come back with a look, so they can say who owns an instance.
    pub reads_labels: bool,
    /// The specs come back: those given and those in effect.
    pub reads_specs: bool,
    pub reads_health: bool,
    /// How old a list may be.
    pub lag_secs: u64,
    pub moves: Moves,
    /// The fields that can say when a periodic process runs.
    pub schedules: &'static [Field],
}

/// What it takes for a running process to be known by another name, without a restart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moves {
    /// It cannot be done.
    Held,
    /// The guard under the old name goes, one under the new name comes.
    Rehost,
    /// Nothing: names are only ours.
    Nothing,
    /// The engine renames it, and takes the new spec with that.
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
        restart_registers_spec: false, // not documented: assuming so costs one idempotent host, never an old guard
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

    /// Under the names that `--caps` takes.
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

    /// Is there a place for the field?
    pub fn supports_field(&self, field: Field) -> bool {
        self.dialect.says(field)
    }
}
