//! Spec fields that only Abide has: health check, restart policy, log rotation, limits, hooks.
//!
//! Every field is optional, and the agent's defaults are not stored here: an unset field enters no digest. A section is
//! compared by its [`parts`](SpecSection::parts), the set fields in canonical form.

use serde::{Deserialize, Serialize};

use super::spec::{Monitor, is_unset};

/// The set fields of a section by name, in canonical form.
pub type SectionParts = Vec<(String, String)>;

/// A group of spec fields that is compared as one field.
pub trait SpecSection: Default + PartialEq {
    fn parts(&self) -> SectionParts;

    fn is_set(&self) -> bool {
        *self != Self::default()
    }
}

/// Collects the set fields of a section.
#[derive(Default)]
pub(super) struct Parts(pub(super) SectionParts);

impl Parts {
    pub(super) fn put(mut self, name: &str, value: Option<impl ToString>) -> Parts {
        self.0.extend(value.map(|value| (name.to_owned(), value.to_string())));
        self
    }

    pub(super) fn list<'a, T: ToString + 'a>(
        self,
        name: &str,
        items: impl IntoIterator<Item = &'a T>,
    ) -> Parts {
        let items: Vec<String> = items.into_iter().map(ToString::to_string).collect();
        self.put(name, (!items.is_empty()).then(|| items.join(" ")))
    }
}

/// A health check of the agent: one probe, repeated.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct HealthCheck {
    #[serde(skip_serializing_if = "is_unset")]
    pub cmd: Option<String>,
    #[serde(skip_serializing_if = "is_unset")]
    pub http: Option<String>,
    /// `HOST:PORT`.
    #[serde(skip_serializing_if = "is_unset")]
    pub tcp: Option<String>,
    /// Seconds after a start in which failures do not count.
    #[serde(skip_serializing_if = "is_unset")]
    pub start_period: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub interval: Option<u32>,
    #[serde(skip_serializing_if = "is_unset")]
    pub timeout: Option<u32>,
    /// Failures in a row that make the process unhealthy.
    #[serde(skip_serializing_if = "is_unset")]
    pub retries: Option<u32>,
}

impl HealthCheck {
    /// Least start period of the agent; `start_check_secs`, if that is longer.
    pub const START_PERIOD: u32 = 30;
    pub const INTERVAL: u32 = 10;
    pub const TIMEOUT: u32 = 5;
    pub const RETRIES: u32 = 3;
    /// Maximum failures in a row.
    pub const MAX_RETRIES: u32 = 1000;
    /// Maximum seconds of a start period, an interval or a timeout.
    pub const MAX_SECONDS: u32 = 86_400;

    /// The first invalid value. Manifests are checked with source locations; a request of another client only here.
    pub fn check(&self) -> Result<(), HealthProblem> {
        let problem = |field: &str, why| HealthProblem { field: format!("health.{field}"), why };
        for (field, text) in [("http", &self.http), ("tcp", &self.tcp)] {
            if text.as_ref().is_some_and(|text| HealthCheck::has_forbidden(text)) {
                return Err(problem(field, "contains a space or a control character"));
            }
        }
        for (field, seconds) in [("interval", self.interval), ("timeout", self.timeout)] {
            if seconds.is_some_and(|seconds| !(1..=HealthCheck::MAX_SECONDS).contains(&seconds)) {
                return Err(problem(field, "is not between 1 and 86400 seconds"));
            }
        }
        if self.start_period.is_some_and(|seconds| seconds > HealthCheck::MAX_SECONDS) {
            return Err(problem("start_period", "is more than 86400 seconds"));
        }
        match self.retries {
            Some(retries) if !(1..=HealthCheck::MAX_RETRIES).contains(&retries) => {
                Err(problem("retries", "is not between 1 and 1000"))
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Whether an address has a character that would end a request line or a header.
    pub fn has_forbidden(address: &str) -> bool {
        address.contains(|one: char| one.is_whitespace() || one.is_control())
    }
}

/// A value of a health check that is not valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthProblem {
    pub field: String,
    pub why: &'static str,
}

impl SpecSection for HealthCheck {
    fn parts(&self) -> SectionParts {
        let HealthCheck { cmd, http, tcp, start_period, interval, timeout, retries } = self;
        Parts::default()
            .put("cmd", cmd.as_ref())
            .put("http", http.as_ref())
            .put("tcp", tcp.as_ref())
            .put("start_period", start_period.as_ref())
            .put("interval", interval.as_ref())
            .put("timeout", timeout.as_ref())
            .put("retries", retries.as_ref())
            .0
    }
}

/// When the agent restarts a resident process that exited.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RestartPolicy {
    #[serde(skip_serializing_if = "is_unset")]
    pub policy: RestartWhen,
    /// Attempts before the process counts as failed; unset: `start_retries`.
    #[serde(skip_serializing_if = "is_unset")]
    pub attempts: Option<u32>,
    /// Exit codes other than 0 that count as success for `on-failure`.
    #[serde(skip_serializing_if = "is_unset")]
    pub success_codes: Vec<u8>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RestartWhen {
    #[default]
    Always,
    OnFailure,
    Never,
}

impl RestartWhen {
    pub const ALL: [RestartWhen; 3] = [RestartWhen::Always, RestartWhen::OnFailure, RestartWhen::Never];

    pub fn word(self) -> &'static str {
        match self {
            RestartWhen::Always => "always",
            RestartWhen::OnFailure => "on-failure",
            RestartWhen::Never => "never",
        }
    }
}

impl SpecSection for RestartPolicy {
    fn parts(&self) -> SectionParts {
        let RestartPolicy { policy, attempts, success_codes } = self;
        Parts::default()
            .put("policy", (*policy != RestartWhen::default()).then(|| policy.word()))
            .put("attempts", attempts.as_ref())
            .list("success_codes", success_codes)
            .0
    }
}

/// Rotation of the log of a foreground process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogRotation {
    /// Bytes.
    #[serde(skip_serializing_if = "is_unset")]
    pub max_size: Option<u64>,
    /// Rotated files that are kept.
    #[serde(skip_serializing_if = "is_unset")]
    pub keep: Option<u32>,
}

impl LogRotation {
    pub const MAX_SIZE: u64 = 10_000_000;
    pub const KEEP: u32 = 5;
    /// Maximum of `keep`: each rotation renames that many files.
    pub const MAX_KEPT: u32 = 1_000;
}

impl SpecSection for LogRotation {
    fn parts(&self) -> SectionParts {
        let LogRotation { max_size, keep } = self;
        Parts::default().put("max_size", max_size.as_ref()).put("keep", keep.as_ref()).0
    }
}

/// Absolute resource limits, in addition to the percentages of [`Resource`](super::Resource).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct AbsoluteLimits {
    /// Bytes.
    #[serde(skip_serializing_if = "is_unset")]
    pub memory: Option<u64>,
    #[serde(skip_serializing_if = "is_unset")]
    pub cpu: Option<Cores>,
}

impl SpecSection for AbsoluteLimits {
    fn parts(&self) -> SectionParts {
        let AbsoluteLimits { memory, cpu } = self;
        Parts::default().put("memory", memory.as_ref()).put("cpu", cpu.map(Cores::get)).0
    }
}

/// A number of processor cores, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "f64", into = "f64")]
pub struct Cores(u32);

impl Cores {
    /// Above zero, at most 10,000.
    pub fn new(cores: f64) -> Option<Cores> {
        let thousandths = (cores * 1000.0).round();
        (1.0..=10_000_000.0).contains(&thousandths).then_some(Cores(thousandths as u32))
    }

    pub fn get(self) -> f64 {
        f64::from(self.0) / 1000.0
    }
}

impl TryFrom<f64> for Cores {
    type Error = &'static str;

    fn try_from(cores: f64) -> Result<Self, Self::Error> {
        Cores::new(cores).ok_or("a number of cores must be above 0 and at most 10000")
    }
}

impl From<Cores> for f64 {
    fn from(cores: Cores) -> f64 {
        cores.get()
    }
}

/// Commands that the agent runs around an operation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hooks {
    /// Runs before every launch; a failure fails the launch.
    #[serde(skip_serializing_if = "is_unset")]
    pub before_start: Option<Hook>,
    /// Runs before a stop and before the stop of a restart; a failure keeps the process running.
    #[serde(skip_serializing_if = "is_unset")]
    pub before_stop: Option<Hook>,
    /// Runs after the start check; a failure fails the start.
    #[serde(skip_serializing_if = "is_unset")]
    pub after_start: Option<Hook>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Hook {
    pub run: String,
    /// Seconds; unset: `op_timeout`.
    #[serde(skip_serializing_if = "is_unset")]
    pub timeout: Option<u32>,
    /// Unset: abort.
    #[serde(skip_serializing_if = "is_unset")]
    pub on_failure: Option<OnHookFailure>,
    /// Whether the hook also runs for the repair of drift; `before_start` always does.
    #[serde(skip_serializing_if = "is_unset")]
    pub drift: Option<bool>,
}

/// The effect of a failed hook on its operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnHookFailure {
    /// The operation fails.
    #[default]
    Abort,
    /// The operation goes on. Its row and the agent's log name the failure.
    Ignore,
}

impl OnHookFailure {
    pub const ALL: [OnHookFailure; 2] = [OnHookFailure::Abort, OnHookFailure::Ignore];

    pub fn word(self) -> &'static str {
        match self {
            OnHookFailure::Abort => "abort",
            OnHookFailure::Ignore => "ignore",
        }
    }
}

impl Hook {
    /// Maximum time limit of `before_stop` and `after_start`, in seconds.
    pub const MAX_SECONDS: u32 = 3600;

    /// The time limit in seconds.
    pub fn seconds(&self, monitor: &Monitor) -> u32 {
        self.timeout.or(monitor.op_timeout).unwrap_or(Monitor::OP_TIMEOUT)
    }

    pub fn aborts(&self) -> bool {
        self.on_failure.unwrap_or_default() == OnHookFailure::Abort
    }

    /// Whether the hook runs for an operation. `repairs`: the operation repairs drift.
    pub fn applies(&self, repairs: bool) -> bool {
        !repairs || self.drift == Some(true)
    }
}

impl Hooks {
    /// The names of all hooks.
    pub const FIELDS: [&str; 3] = ["before_start", "before_stop", "after_start"];

    /// All hooks by name, in the order of [`Hooks::FIELDS`].
    pub fn by_name(&self) -> [(&'static str, Option<&Hook>); 3] {
        let Hooks { before_start, before_stop, after_start } = self;
        let [before, stop, after] = Hooks::FIELDS;
        [(before, before_start.as_ref()), (stop, before_stop.as_ref()), (after, after_start.as_ref())]
    }

    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Hook> {
        let Hooks { before_start, before_stop, after_start } = self;
        [before_start, before_stop, after_start].into_iter().flatten()
    }

    /// Time that the hooks of one launch may take, in seconds.
    pub fn launch_seconds(&self, monitor: &Monitor) -> u32 {
        let hooks = [&self.before_start, &self.after_start].into_iter().flatten();
        hooks.fold(0, |sum, hook| sum.saturating_add(hook.seconds(monitor)))
    }

    /// Time that the hook of a stop may take, in seconds.
    pub fn stop_seconds(&self, monitor: &Monitor) -> u32 {
        self.before_stop.as_ref().map_or(0, |hook| hook.seconds(monitor))
    }

    /// The first invalid value. Manifests are checked with source locations; a request of another client only here.
    pub fn check(&self) -> Result<(), HookProblem> {
        for (name, hook) in self.by_name() {
            let Some(hook) = hook else { continue };
            let problem = |field: &str, why| HookProblem { field: format!("hooks.{name}.{field}"), why };
            if hook.run.is_empty() {
                return Err(problem("run", "is missing"));
            }
            let is_launch = name == Hooks::FIELDS[0];
            if is_launch && hook.drift.is_some() {
                return Err(problem("drift", "is not supported: before_start runs before every launch"));
            }
            if !is_launch && hook.timeout.is_some_and(|seconds| !(1..=Hook::MAX_SECONDS).contains(&seconds)) {
                return Err(problem("timeout", "is not between 1 and 3600 seconds"));
            }
        }
        Ok(())
    }
}

/// A value of a hook that is not valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HookProblem {
    pub field: String,
    pub why: &'static str,
}

impl SpecSection for Hooks {
    fn parts(&self) -> SectionParts {
        let mut parts = Parts::default();
        for (name, hook) in self.by_name() {
            let Some(Hook { run, timeout, on_failure, drift }) = hook else { continue };
            // The defaults enter no digest.
            let on_failure = on_failure.filter(|word| *word != OnHookFailure::default());
            parts = parts.put(&format!("{name}.run"), Some(run));
            parts = parts.put(&format!("{name}.timeout"), timeout.as_ref());
            parts = parts.put(&format!("{name}.on_failure"), on_failure.map(OnHookFailure::word));
            parts = parts.put(&format!("{name}.drift"), drift.filter(|drift| *drift));
        }
        parts.0
    }
}

/// The signals that a spec may name, with their numbers on Linux.
pub const SIGNALS: [(&str, i32); 16] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("ABRT", 6),
    ("KILL", 9),
    ("USR1", 10),
    ("USR2", 12),
    ("PIPE", 13),
    ("ALRM", 14),
    ("TERM", 15),
    ("CONT", 18),
    ("TSTP", 20),
    ("TTIN", 21),
    ("TTOU", 22),
    ("WINCH", 28),
    ("PWR", 30),
];

/// The number of a signal by its name without `SIG`.
pub fn signal_number(name: &str) -> Option<i32> {
    SIGNALS.iter().find(|(known, _)| *known == name).map(|(_, number)| *number)
}

/// Bytes of a text such as `512MB` (powers of 1000) or `1GiB` (powers of 1024).
pub fn bytes(text: &str) -> Option<u64> {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "KB" | "kB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "TB" => 1_000_000_000_000,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(factor).filter(|bytes| i64::try_from(*bytes).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_a_unit_or_are_bytes() {
        assert_eq!(bytes("512MB"), Some(512_000_000));
        assert_eq!(bytes("1 GiB"), Some(1 << 30));
        assert_eq!(bytes("77"), Some(77));
        for wrong in ["", "MB", "1.5MB", "-1", "1mb", "99999999999999999999", "9999999999TB"] {
            assert_eq!(bytes(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn an_unset_section_has_no_parts() {
        assert!(HealthCheck::default().parts().is_empty());
        assert!(RestartPolicy::default().parts().is_empty());
        assert!(LogRotation::default().parts().is_empty());
        assert!(AbsoluteLimits::default().parts().is_empty());
        assert!(Hooks::default().parts().is_empty());
    }
}
