//! Rows of `--observed FILE`: parses the output of `get processes -o json` or `-o yaml` into [`Observed`].
//!
//! A saved observation can so be planned on later, and a made-up one used for a rehearsal.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::Read;
use std::path::Path as FilePath;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::check::{self, ValueChecker};
use super::document::{SpecEntry, TextOrNumber};
use super::problem::{FieldPath, did_you_mean};
use super::variables::escape_spec;
use super::{parallel, variables};
use crate::clock;
pub use crate::contract::ROW_FIELDS;
use crate::contract::{OfflineRow, is_row_field, row_fields};
use crate::model::{
    DigestKeyRef, HashedSpec, Health, HostKey, InstanceKey, KnownSpec, LastRun, Name, Observed,
    ObservedInstance, ObservedSpecs, RunningProcess, Spec, SpecRevision, Time,
};

/// Errors of a rows file, one sentence each.
pub type RowErrors = Vec<String>;

/// Maximum number of lists and maps that start on one line of YAML.
const MAX_NESTING: usize = 200;

/// Names of the unknown fields of a row.
struct UnknownFields(Vec<String>);

impl<'de> Deserialize<'de> for UnknownFields {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct UnknownFieldsVisitor;
        impl<'de> serde::de::Visitor<'de> for UnknownFieldsVisitor {
            type Value = UnknownFields;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<M: serde::de::MapAccess<'de>>(self, mut map: M) -> Result<UnknownFields, M::Error> {
                let mut unknown = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    map.next_value::<serde::de::IgnoredAny>()?;
                    if !is_row_field(&name) {
                        unknown.push(name);
                    }
                }
                Ok(UnknownFields(unknown))
            }
        }
        from.deserialize_map(UnknownFieldsVisitor)
    }
}

/// Warnings for unknown fields, which are probably misspelled.
fn unknown_fields(rows: &[&RawValue]) -> Vec<String> {
    let names = parallel::map(rows, |row| {
        serde_json::from_str::<UnknownFields>(row.get()).map(|UnknownFields(names)| names).unwrap_or_default()
    });
    let names: BTreeSet<String> = names.into_iter().flatten().collect();
    names
        .iter()
        .take(MAX_REPORTED)
        .map(|name| match did_you_mean(name, row_fields()) {
            Some(meant) => format!("unknown field {name:?} is ignored. Did you mean {meant:?}?"),
            None => format!("unknown field {name:?} is ignored"),
        })
        .collect()
}

/// Maximum number of reported errors.
const MAX_REPORTED: usize = 50;

/// Reads a file of rows (`-`: standard input), with warnings. `now` is the time of the observation; unset, it is the newest
/// report time, or else the current time.
pub fn read(path: &FilePath, most: u64, now: Option<Time>) -> Result<(Observed, Vec<String>), RowErrors> {
    let mut bytes = Vec::new();
    let read = match path.as_os_str() == "-" {
        true => std::io::stdin().lock().take(most.saturating_add(1)).read_to_end(&mut bytes),
        false => std::fs::File::open(path)
            .and_then(|file| file.take(most.saturating_add(1)).read_to_end(&mut bytes)),
    };
    read.map_err(|error| vec![format!("cannot read the rows: {error}")])?;
    if bytes.len() as u64 > most {
        return Err(vec![format!(
            "the file is larger than {most} bytes; if this is intended, raise --max-file-bytes"
        )]);
    }
    let text = String::from_utf8(bytes).map_err(|_| vec!["the file is not UTF-8".to_owned()])?;
    parse(text.trim_start_matches('\u{feff}'), now)
}

pub fn parse(text: &str, now: Option<Time>) -> Result<(Observed, Vec<String>), RowErrors> {
    let yaml;
    let text = match text.trim_start().as_bytes().first() {
        Some(b'[') => text,
        Some(b'{') | None => return Err(vec!["the file is not a list of rows".to_owned()]),
        Some(_) => {
            yaml = from_yaml(text)?;
            &yaml
        }
    };
    let raw: Vec<&RawValue> = serde_json::from_str(text)
        .map_err(|error| vec![format!("the file is not a list of rows: {error}")])?;
    let rows = parallel::map(&raw, |raw| serde_json::from_str::<OfflineRow<'_>>(raw.get()));
    let mut faults = RowErrors::new();
    let mut good = Vec::with_capacity(rows.len());
    for (nth, row) in rows.into_iter().enumerate() {
        match row {
            Ok(row) => good.push((nth + 1, row)),
            Err(error) => faults.push(format!("row {}: {}", nth + 1, plain(&error))),
        }
    }
    let odd = unknown_fields(&raw);
    let specs = specs(&good, &mut faults);
    let mut observed = Observed::default();
    let mut seen = Vec::with_capacity(good.len());
    for (nth, row) in good {
        match parse_row(row, &specs, &mut observed.gaps) {
            Ok(row) => seen.extend(row.map(|(key, row)| (key, nth, row))),
            Err((key, fault)) => {
                let what = key.map(|key| format!(" ({key})")).unwrap_or_default();
                faults.push(format!("row {nth}{what}: {fault}"));
            }
        }
    }
    seen.sort_by(|(one, _, _), (other, _, _)| one.cmp(other));
    for pair in seen.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
        faults.push(format!("row {} ({}): a second row for this instance", pair[1].1, pair[1].0));
    }
    // A map built from a sorted list is dense and faster to iterate.
    observed.instances = seen.into_iter().map(|(key, _, row)| (key, row)).collect();
    if faults.len() > MAX_REPORTED {
        let more = faults.len() - MAX_REPORTED;
        faults.truncate(MAX_REPORTED);
        faults.push(format!("… and {more} more"));
    }
    let newest_report = || observed.instances.values().filter_map(|instance| instance.report_time).max();
    observed.at = now.or_else(newest_report).unwrap_or_else(|| clock::with_zones(&Default::default()).at);
    if faults.is_empty() { Ok((observed, odd)) } else { Err(faults) }
}

/// Parses a list of rows in YAML, as `get processes -o yaml` prints it.
fn from_yaml(text: &str) -> Result<String, RowErrors> {
    let wrong = |what: &dyn std::fmt::Display| vec![format!("the file is not a list of rows: {what}")];
    // The YAML parser needs quadratic time in the nesting depth; valid rows are not that deep.
    let deep = |line: &str| line.matches(['{', '[']).count() + line.matches("- ").count() > MAX_NESTING;
    if text.lines().any(deep) {
        return Err(wrong(&"the values are nested too deeply"));
    }
    let value: serde_yaml::Value = serde_yaml::from_str(text).map_err(|error| wrong(&error))?;
    if !value.is_sequence() {
        return Err(wrong(&"expected a list, as `get processes -o json` prints"));
    }
    serde_json::to_string(&value).map_err(|error| wrong(&error))
}

/// serde's message without the position inside of the row, and without the found text, which may be a secret.
fn plain(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(message, _)| message);
    let text = text.replace("struct Row", "an object").replace("u32", "a whole number from 0");
    let text = text.as_str();
    match (text.split_once("string \""), text.rsplit_once("\", expected ")) {
        (Some((before, _)), Some((_, expected))) => format!("{before}a text, expected {expected}"),
        _ => text.to_owned(),
    }
}

/// Parses each distinct pair of spec and labels once: thousands of rows may share them.
type SpecText<'a> = (&'a str, Option<&'a str>);

fn specs<'a>(
    rows: &[(usize, OfflineRow<'a>)],
    faults: &mut RowErrors,
) -> HashMap<SpecText<'a>, Arc<HashedSpec>> {
    let mut all: BTreeMap<SpecText<'a>, usize> = BTreeMap::new();
    for (nth, row) in rows {
        for spec in [row.spec, row.live_spec].into_iter().flatten() {
            all.entry((spec.get(), row.labels.map(RawValue::get))).or_insert(*nth);
        }
    }
    let all: Vec<(SpecText<'a>, usize)> = all.into_iter().collect();
    let read = parallel::map(&all, |((spec, labels), _)| {
        self::spec(spec, *labels).map(|spec| Arc::new(HashedSpec::new(spec)))
    });
    let mut specs = HashMap::with_capacity(all.len());
    for ((written, nth), spec) in all.into_iter().zip(read) {
        match spec {
            Ok(spec) => {
                specs.insert(written, spec);
            }
            Err(fault) => faults.push(format!("row {nth}: {fault}")),
        }
    }
    specs
}

/// Parses an observed spec. A `${` in it belongs to the shell: variables are not replaced.
fn spec(text: &str, labels: Option<&str>) -> Result<Spec, RowError> {
    let mut entry: SpecEntry = serde_json::from_str(text).map_err(RowError::Spec)?;
    let escaped = text.contains("${");
    if escaped {
        escape_spec(&mut entry);
    }
    let mut values = ValueChecker::default();
    let mut spec = check::spec(&entry, &FieldPath::of("spec"), false, &mut values);
    if let Some(finding) = values.findings.iter().find(|finding| finding.is_error()) {
        return Err(RowError::Finding(finding.message.clone()));
    }
    if escaped {
        spec = variables::unescape(&spec);
    }
    spec.labels = self::labels(labels)?;
    spec.labels.retain(|name, _| !name.starts_with("abide_"));
    Ok(spec)
}

fn labels(text: Option<&str>) -> Result<BTreeMap<String, String>, RowError> {
    let Some(text) = text else { return Ok(BTreeMap::new()) };
    let labels: Option<BTreeMap<String, TextOrNumber>> =
        serde_json::from_str(text).map_err(RowError::Labels)?;
    Ok(labels.unwrap_or_default().into_iter().map(|(name, value)| (name, value.to_string())).collect())
}

/// Reason why a row is not valid.
#[derive(Debug, thiserror::Error)]
enum RowError {
    #[error("spec: {}", plain(.0))]
    Spec(serde_json::Error),
    #[error("labels: {}", plain(.0))]
    Labels(serde_json::Error),
    /// The text of a problem in the spec.
    #[error("{0}")]
    Finding(String),
    #[error("the row has no `instance`, and is not a host with `unknown: true`")]
    NoInstance,
    #[error("namespace, name or host differs from that of `instance`")]
    Differs,
    #[error("{field} {text:?} is not a time such as 2026-11-16T08:00:00Z")]
    Time { field: &'static str, text: String },
    #[error("health {word:?} is not one of {}", Health::ALL.map(Health::word).join(", "))]
    Health { word: String },
    #[error("ran must be true, false or the run part of a revision (8 hex digits)")]
    Ran,
}

/// Error of a row, with its instance if known.
type FaultyRow = (Option<InstanceKey>, RowError);

/// The observed instance of a row. `None` for a host that could not be observed, which is added to the gaps.
fn parse_row(
    row: OfflineRow<'_>,
    specs: &HashMap<SpecText<'_>, Arc<HashedSpec>>,
    gaps: &mut BTreeMap<HostKey, String>,
) -> Result<Option<(InstanceKey, ObservedInstance)>, FaultyRow> {
    let Some(key) = row.instance.clone() else {
        return match row.host {
            Some(host) if row.unknown => {
                gaps.insert(host, "could not be observed".to_owned());
                Ok(None)
            }
            _ => Err((None, RowError::NoInstance)),
        };
    };
    match self::observed_instance(row, &key, specs) {
        Ok(seen) => Ok(Some((key, seen))),
        Err(fault) => Err((Some(key), fault)),
    }
}

fn observed_instance(
    row: OfflineRow<'_>,
    key: &InstanceKey,
    specs: &HashMap<SpecText<'_>, Arc<HashedSpec>>,
) -> Result<ObservedInstance, RowError> {
    let differs =
        |text: &Option<String>, name: &Name| text.as_ref().is_some_and(|text| text != name.as_str());
    if differs(&row.namespace, &key.namespace)
        || differs(&row.name, &key.name)
        || row.host.as_ref().is_some_and(|host| *host != key.host)
    {
        return Err(RowError::Differs);
    }
    let raw_labels = row.labels.map(RawValue::get);
    let mut labels = self::labels(raw_labels)?;
    let ours = |name: &str| labels.get(name).cloned();
    let owner = row.owner.or_else(|| ours("abide_owner"));
    let revision = row.revision.or_else(|| ours("abide_rev").and_then(|text| text.parse().ok()));
    labels.retain(|name, _| !name.starts_with("abide_"));
    let digest_key = row.secret_key.map(|id| DigestKeyRef::Unknown(id.into()));
    let version = |spec: Option<&RawValue>, revision: Option<SpecRevision>| {
        if digest_key.is_some() {
            return KnownSpec::Unknown;
        }
        let spec = spec.and_then(|spec| specs.get(&(spec.get(), raw_labels)).cloned());
        match (spec, revision) {
            (Some(spec), _) => KnownSpec::Full(spec),
            (None, Some(revision)) => KnownSpec::Digests(revision),
            (None, None) => KnownSpec::Unknown,
        }
    };
    let registered_spec = version(row.spec, revision);
    let live = match version(row.live_spec, row.live_revision) {
        KnownSpec::Unknown => registered_spec.clone(),
        known => known,
    };
    let time = |field: &'static str, text: Option<String>| match text {
        None => Ok(None),
        Some(text) => match clock::read(&text) {
            Some(time) => Ok(Some(time)),
            None => Err(RowError::Time { field, text }),
        },
    };
    Ok(ObservedInstance {
        unknown: row.unknown,
        registered: row.registered,
        hosted: row.hosted,
        running: row.running,
        completed: row.completed,
        labels,
        owner: owner.map(Arc::from),
        health: health(row.health)?,
        since: time("since", row.since)?,
        report_time: time("report_time", row.report_time)?,
        specs: ObservedSpecs {
            registered: registered_spec,
            live,
            is_live_assumed: row.live_spec_unknown,
            ran: if digest_key.is_some() { LastRun::Unknown } else { last_run(row.ran)? },
            digest_key,
            ..ObservedSpecs::default()
        },
        process: RunningProcess { pid: row.pid, started: None, not_owned: false },
    })
}

fn health(word: Option<String>) -> Result<Health, RowError> {
    let Some(word) = word else { return Ok(Health::default()) };
    let known = Health::ALL.into_iter().find(|health| health.word() == word);
    known.ok_or(RowError::Health { word })
}

fn last_run(ran: Option<&RawValue>) -> Result<LastRun, RowError> {
    use serde_json::Value;
    let Some(ran) = ran else { return Ok(LastRun::Unknown) };
    let digest = |text: &str| match text.parse::<SpecRevision>() {
        Ok(revision) => Some(revision.run),
        Err(_) => u32::from_str_radix(text, 16).ok().filter(|_| text.len() == 8),
    };
    let known = match serde_json::from_str(ran.get()) {
        Ok(Value::Null) => Some(LastRun::Unknown),
        Ok(Value::Bool(true)) => Some(LastRun::Given),
        Ok(Value::Bool(false)) => Some(LastRun::Never),
        Ok(Value::String(text)) => digest(&text).map(LastRun::Digest),
        Ok(_) | Err(_) => None,
    };
    known.ok_or(RowError::Ran)
}
