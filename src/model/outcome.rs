//! Outcome of a step, and sync status of an instance: the words of plans and rows.

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StepOutcome {
    Done,
    /// The target was in the requested state already.
    AlreadySo,
    Failed,
    /// The step was in flight at the deadline.
    TimedOut,
    /// The step was sent, and its outcome could not be determined.
    Unknown,
    /// The step was not sent.
    Skipped,
}

impl StepOutcome {
    pub const ALL: [StepOutcome; 6] = [
        StepOutcome::Done,
        StepOutcome::AlreadySo,
        StepOutcome::Failed,
        StepOutcome::TimedOut,
        StepOutcome::Unknown,
        StepOutcome::Skipped,
    ];

    pub fn word(self) -> &'static str {
        match self {
            StepOutcome::Done => "Done",
            StepOutcome::AlreadySo => "AlreadySo",
            StepOutcome::Failed => "Failed",
            StepOutcome::TimedOut => "TimedOut",
            StepOutcome::Unknown => "Unknown",
            StepOutcome::Skipped => "Skipped",
        }
    }

    pub fn is_well(self) -> bool {
        matches!(self, StepOutcome::Done | StepOutcome::AlreadySo)
    }
}

/// The words are stable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SyncStatus {
    InSync,
    /// A plan has steps for it.
    OutOfSync,
    /// It could not be observed, or is outside the selection.
    Unknown,
    /// It differs, and the plan holds it.
    Held,
    /// It differs, and its namespace or everything is paused.
    Paused,
    /// Owned, and no longer in any manifest.
    Orphan,
}

impl SyncStatus {
    pub const ALL: [SyncStatus; 6] = [
        SyncStatus::InSync,
        SyncStatus::OutOfSync,
        SyncStatus::Unknown,
        SyncStatus::Held,
        SyncStatus::Paused,
        SyncStatus::Orphan,
    ];

    pub fn word(self) -> &'static str {
        match self {
            SyncStatus::InSync => "InSync",
            SyncStatus::OutOfSync => "OutOfSync",
            SyncStatus::Unknown => "Unknown",
            SyncStatus::Held => "Held",
            SyncStatus::Paused => "Paused",
            SyncStatus::Orphan => "Orphan",
        }
    }
}
