//! Limits of a caller, as the apps file and the users file set them.

use serde::Deserialize;

/// Tasks of one app with rows that are not final.
const DEFAULT_TASKS: usize = 10_000;

/// Limits of an app.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppLimits {
    /// Registered instances of a namespace, after a call of this app. `None`: no limit.
    pub instances: Option<usize>,
    /// Open tasks of this app.
    pub tasks: usize,
}

/// Limits as written in the apps file.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct LimitsEntry {
    instances: Option<usize>,
    tasks: Option<usize>,
}

impl AppLimits {
    /// The app's own values, else those of the file, else the defaults.
    pub(super) fn of(own: LimitsEntry, file: LimitsEntry) -> AppLimits {
        AppLimits {
            instances: own.instances.or(file.instances),
            tasks: own.tasks.or(file.tasks).unwrap_or(DEFAULT_TASKS),
        }
    }
}
