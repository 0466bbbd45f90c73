//! Limits of an app: registered instances per namespace, and open tasks.

use serde::Deserialize;

/// Registered instances of one namespace.
const DEFAULT_INSTANCES: usize = 1_000_000;
/// Tasks of one app with rows that are not final.
const DEFAULT_TASKS: usize = 10_000;

/// Limits of an app, with defaults in place of values that are not set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AppLimits {
    /// Registered instances of a namespace, after a call of this app.
    pub instances: usize,
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
            instances: own.instances.or(file.instances).unwrap_or(DEFAULT_INSTANCES),
            tasks: own.tasks.or(file.tasks).unwrap_or(DEFAULT_TASKS),
        }
    }
}

impl Default for AppLimits {
    fn default() -> AppLimits {
        AppLimits::of(LimitsEntry::default(), LimitsEntry::default())
    }
}
