//! What may stand in a manifest: every field with its shape, default, meaning and source, as one table.
//!
//! `structure` checks documents against it, `schema` prints it for editors, `explain` for people. The structs
//! of `document` are the same thing for serde; a test holds the two together.

#[rustfmt::skip]
mod table;

use std::ops::RangeInclusive;

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
    /// Other spellings that real bodies use; the name is what we write.
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
    /// Text in which a whole number is taken too, with a warning.
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
    Section(&'static Section),
    List(&'static Shape),
    /// Keys of the user's choosing.
    Map(&'static Shape),
    OneOf(&'static [Shape]),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requirement {
    Required,
    Optional,
    /// In a document without apiVersion and kind, as GSE's documents have it.
    RequiredInBody,
    /// Tolerated in such a document, ignored with a warning.
    IgnoredInBody,
}

/// Which document a field comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FieldOrigin {
    /// GSE register_proc_info and operate_proc; JOB too where it has the same thing under this or another name.
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
    /// The entry that is called so, by its name or another spelling.
    pub fn entry(&self, name: &str) -> Option<&'static Entry> {
        self.entries.iter().find(|e| e.name == name || e.aliases.contains(&name))
    }
}

impl Shape {
    /// In words, for people.
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
            Shape::Section(_) => "map".into(),
            Shape::List(of) => format!("list of {}", of.describe()),
            Shape::Map(of) => format!("map of names to {}", of.describe()),
            Shape::OneOf(shapes) => shapes.iter().map(Shape::describe).collect::<Vec<_>>().join(", or "),
        }
    }
}

/// Longer than this nobody waits for a process on purpose.
pub const SECONDS: RangeInclusive<i64> = 0..=86_400;
/// A cycle may be long, but not longer than a year.
pub const CYCLE_SECONDS: RangeInclusive<i64> = 0..=366 * 86_400;
pub const RETRIES: RangeInclusive<i64> = 0..=10_000;
pub const AUTO_TYPE: RangeInclusive<i64> = 0..=2;
pub const ANY_COUNT: RangeInclusive<i64> = 0..=i64::MAX;
pub const SMALL_COUNT: RangeInclusive<i64> = 0..=u32::MAX as i64;
pub const INSTANCES: RangeInclusive<i64> = 1..=1_000_000;

pub const STATES: &[&str] = &["running", "stopped", "unhosted", "absent"];
pub const START_MODES: &[&str] = &["daemon", "foreground"];
pub const PROTECTIONS: &[&str] = &["delete", "restart", "stop"];
pub const EFFECTS: &[&str] = &["none", "register", "reload", "restart", "replace"];
pub const DISRUPTIONS: &[&str] = &["start", "stop", "restart", "reload", "delete"];
pub const KINDS: &[&str] = &["Process", "HostGroup", "Defaults", "Policy"];
pub const API_VERSION: &str = "abide/v1";

/// The section for a kind; an unknown kind is read as a Process, so that its other problems are found too.
pub fn section(kind: Option<&str>) -> &'static Section {
    match kind {
        Some("HostGroup") => &HOST_GROUP,
        Some("Defaults") => &DEFAULTS,
        Some("Policy") => &POLICY,
        _ => &PROCESS,
    }
}

/// Is this a spelling of that field? Only parts of a spec have more than one.
pub fn same_field(written: &str, name: &str) -> bool {
    let spells = |section: &&Section| section.entry(written).is_some_and(|entry| entry.name == name);
    written == name || table::WITH_ALIASES.iter().any(spells)
}

/// All kinds, in the order in which people are told of them.
pub static ALL_KINDS: [&Section; 4] = [&PROCESS, &HOST_GROUP, &DEFAULTS, &POLICY];
