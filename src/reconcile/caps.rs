//! What a target can do, as data. The core asks these questions and never for a dialect's name.

/// The abilities of one dialect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// register and unregister exist, and what was given stays when the guard goes.
    pub registry: bool,
    /// start, restart, reload, host and stop work with the spec that was given, not with one they are sent.
    pub uses_given: bool,
    /// restart and reload also tell the engine the new spec.
    pub restart_gives: bool,
    /// stop and unhost must be sent the spec that the process or the guard has.
    pub stop_needs_old: bool,
    /// Without a restart_cmd there is no restart, without a stop_cmd no stop.
    pub needs_commands: bool,
}

impl Caps {
    pub const GSE_V1: Caps = Caps {
        registry: true,
        uses_given: true,
        restart_gives: false,
        stop_needs_old: false,
        needs_commands: true,
    };

    pub const GSE_V2: Caps = Caps {
        registry: false,
        uses_given: false,
        restart_gives: false,
        stop_needs_old: true,
        needs_commands: true,
    };

    /// GSE 2.0 through the API gateway: the same operations, other addresses.
    pub const GSE_APIGW: Caps = Caps::GSE_V2;

    pub const JOB: Caps = Caps::GSE_V2;

    pub const LOCAL: Caps = Caps {
        registry: true,
        uses_given: false,
        restart_gives: true,
        stop_needs_old: false,
        needs_commands: false,
    };
}
