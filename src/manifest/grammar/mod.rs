//! Manifest grammar: one table of all fields with their shapes, defaults, meanings and origins.
//!
//! `structure` checks documents against the table, `schema` exports it for editors, `explain` prints it. The serde
//! structs of `document` have the same fields; a test compares the two.

#[rustfmt::skip]
mod overlay;
#[rustfmt::skip]
mod table;

use std::ops::RangeInclusive;

use crate::model::LogRotation;

pub use overlay::OVERLAY;
pub use table::{DEFAULTS, HOST_GROUP, JOB_BODY, POLICY, PROCESS};

/// A map with known fields.
#[derive(Debug)]
pub struct Section {
    pub name: &'static str,
    pub about: &'static str,
    pub entries: &'static [Entry],
}

/// One known field of a section.
#[derive(Debug)]
pub struct Entry {
    pub name: &'static str,
    /// Alternative spellings that request bodies use. Abide writes `name`.
    pub aliases: &'static [&'static str],
    pub shape: Shape,
    pub need: Requirement,
    pub default: Option<&'static str>,
    pub meaning: &'static str,
    pub source: FieldOrigin,
}

#[derive(Debug)]
pub enum Shape {
    Text,
    /// A namespace or a name.
    Name,
    Ip,
    /// Text; a whole number is accepted with a warning.
    LooseText,
    /// One of a few words.
    Word(&'static [&'static str]),
    AbsolutePath,
    Int(RangeInclusive<i64>),
    /// A number from 0 to 100.
    Percent,
    Bool,
    /// A count, or a share such as `10%`.
    Amount,
    /// Such as `30s`, `5m`, `1h30m`.
    Duration,
    /// Bytes, or such as `10MB` or `1GiB`.
    Size,
    Number,
    Section(&'static Section),
    List(&'static Shape),
    /// A map with user-defined keys.
    Map(&'static Shape),
    OneOf(&'static [Shape]),
    /// Fields of a Process. A null removes a field.
    Patch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    Required,
    Optional,
    /// Required in a request body (no apiVersion or kind), as in GSE's documents.
    RequiredInBody,
    /// Accepted in a request body, and ignored with a warning.
    IgnoredInBody,
}

/// API that defines a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldOrigin {
    /// GSE register_proc_info and operate_proc.
    Gse,
    GseAndJob,
    GseRegister,
    GseOperate,
    Job,
    Abide,
}

impl FieldOrigin {
    pub fn sentence(self) -> &'static str {
        match self {
            FieldOrigin::Gse => "GSE register_proc_info, operate_proc",
            FieldOrigin::GseAndJob => {
                "GSE register_proc_info, operate_proc; JOB manage_proc, operate_process"
            }
            FieldOrigin::GseRegister => "GSE register_proc_info",
            FieldOrigin::GseOperate => "GSE operate_proc; JOB manage_proc, operate_process",
            FieldOrigin::Job => "JOB manage_proc, operate_process",
            FieldOrigin::Abide => "Abide",
        }
    }
}

impl Section {
    /// The entry with this name or alias.
    pub fn entry(&self, name: &str) -> Option<&'static Entry> {
        self.entries.iter().find(|e| e.name == name || e.aliases.contains(&name))
    }
}

impl Shape {
    /// Human-readable type.
    pub fn describe(&self) -> String {
        match self {
            Shape::Text | Shape::Name | Shape::LooseText => "text".into(),
            Shape::Ip => "IP address".into(),
            Shape::Word(words) => words.join(" | "),
            Shape::AbsolutePath => "absolute path".into(),
            Shape::Int(range) if *range.start() == i64::MIN => "whole number".into(),
            Shape::Int(range) if *range.end() == i64::MAX => {
                format!("whole number from {}", range.start())
            }
            Shape::Int(range) => format!("whole number, {} to {}", range.start(), range.end()),
            Shape::Percent => "number, 0 to 100".into(),
            Shape::Bool => "true | false".into(),
            Shape::Amount => "count, or share such as 10%".into(),
            Shape::Duration => "duration such as 30s, 5m, 1h30m".into(),
            Shape::Size => "size such as 10MB or 1GiB, or bytes".into(),
            Shape::Number => "number".into(),
            Shape::Section(_) => "map".into(),
            Shape::Patch => "map of Process fields".into(),
            Shape::List(of) => format!("list of {}", of.describe()),
            Shape::Map(of) => format!("map of names to {}", of.describe()),
            Shape::OneOf(shapes) => shapes.iter().map(Shape::describe).collect::<Vec<_>>().join(", or "),
        }
    }
}

/// Upper bound of one day: a longer wait is a mistake.
pub const SECONDS: RangeInclusive<i64> = 0..=86_400;
/// Upper bound of one year.
pub const CYCLE_SECONDS: RangeInclusive<i64> = 0..=366 * 86_400;
pub const RETRIES: RangeInclusive<i64> = 0..=10_000;
pub const AUTO_TYPE: RangeInclusive<i64> = 0..=2;
pub const ANY_COUNT: RangeInclusive<i64> = 0..=i64::MAX;
pub const SMALL_COUNT: RangeInclusive<i64> = 0..=u32::MAX as i64;
pub const INSTANCES: RangeInclusive<i64> = 1..=1_000_000;

pub const EXIT_CODES: RangeInclusive<i64> = 0..=255;
pub const HEALTH_RETRIES: RangeInclusive<i64> = 1..=1_000;
pub const LOGS_KEPT: RangeInclusive<i64> = 0..=LogRotation::MAX_KEPT as i64;
pub const NICE: RangeInclusive<i64> = -20..=19;
pub const OOM_SCORE_ADJ: RangeInclusive<i64> = -1000..=1000;

pub const RESTART_POLICIES: &[&str] = &["always", "on-failure", "never"];
pub const ON_HOOK_FAILURE: &[&str] = &["abort", "ignore"];
pub const PROTECT_SYSTEM: &[&str] = &["full", "strict"];
/// As in `model::SIGNALS`.
pub const SIGNAL_NAMES: &[&str] = &[
    "HUP", "INT", "QUIT", "ABRT", "KILL", "USR1", "USR2", "PIPE", "ALRM", "TERM", "CONT", "TSTP", "TTIN",
    "TTOU", "WINCH", "PWR",
];
pub const STATES: &[&str] = &["running", "stopped", "unhosted", "absent"];
pub const START_MODES: &[&str] = &["daemon", "foreground"];
/// Values of `type`, in the order of their codes in auto_type.
pub const PROCESS_TYPES: &[&str] = &["schedule", "service", "job"];
pub const PROTECTIONS: &[&str] = &["delete", "restart", "stop"];
pub const PAUSES: &[&str] = &["promoted"];
pub const EFFECTS: &[&str] = &["none", "register", "reload", "restart", "replace"];
pub const DISRUPTIONS: &[&str] = &["start", "stop", "restart", "reload", "delete"];
pub const KINDS: &[&str] = &["Process", "HostGroup", "Defaults", "Policy", "Overlay"];
pub const API_VERSION: &str = "abide/v1";

/// The section of a kind. An unknown kind is read as a Process, so that its other problems are reported too.
pub fn section(kind: Option<&str>) -> &'static Section {
    match kind {
        Some("HostGroup") => &HOST_GROUP,
        Some("Defaults") => &DEFAULTS,
        Some("Policy") => &POLICY,
        Some("Overlay") => &OVERLAY,
        _ => &PROCESS,
    }
}

/// The fields that a patch may have.
pub fn patch_fields() -> Vec<&'static str> {
    let is_allowed = |entry: &&Entry| {
        entry.need != Requirement::IgnoredInBody && !matches!(entry.name, "kind" | "apiVersion")
    };
    PROCESS.entries.iter().filter(is_allowed).map(|entry| entry.name).collect()
}

/// Whether `written` is the name or an alias of field `name`. Only spec sections have aliases.
pub fn same_field(written: &str, name: &str) -> bool {
    let has_spelling = |section: &&Section| section.entry(written).is_some_and(|entry| entry.name == name);
    written == name || table::WITH_ALIASES.iter().any(has_spelling)
}

/// All kinds, in display order.
pub static ALL_KINDS: [&Section; 5] = [&PROCESS, &HOST_GROUP, &DEFAULTS, &POLICY, &OVERLAY];
