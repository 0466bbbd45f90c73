//! Sandbox of a systemd service: settings of systemd.exec that manifests have under the same meaning.

use std::collections::BTreeSet;

use super::service::{Service, is_true};
use crate::import::FileReader;
use crate::import::calendar::span_ms;
use crate::import::draft::Draft;
use crate::import::ini::IniEntry;
use crate::import::words::{self, QuoteStyle};
use crate::manifest::document::{Map, ProtectValue, Text, TextOrNumber};
use crate::model::{Sandbox, Ulimit, capability_names, octal_mask, ulimit_number};

impl Service<'_> {
    /// Converts a setting of the sandbox. False: the setting is another one.
    pub(super) fn sandbox(&self, entry: &IniEntry, draft: &mut Draft, file: &mut FileReader<'_, '_>) -> bool {
        let IniEntry { key, value, line } = entry;
        let sandbox = &mut draft.spec.sandbox;
        match key.as_str() {
            "NoNewPrivileges" => sandbox.no_new_privs = Some(is_true(value)),
            // The umask of a process whose manifest sets none.
            "UMask" if matches!(value.as_str(), "022" | "0022") => {}
            "UMask" => match octal_mask(value) {
                Some(mask) => sandbox.umask = Some(Text(format!("{mask:04o}"))),
                None => file.reject(*line, "UMask is not an octal mask", "such as 0027"),
            },
            "Nice" => sandbox.nice = number(entry, Sandbox::NICE, file),
            "OOMScoreAdjust" => sandbox.oom_score_adj = number(entry, Sandbox::OOM_SCORE_ADJ, file),
            "PrivateTmp" => sandbox.private_tmp = Some(is_true(value) || value == "disconnected"),
            "ProtectSystem" => match value.as_str() {
                "full" | "strict" => sandbox.protect_system = Some(ProtectValue::Word(value.clone())),
                value if is_true(value) => sandbox.protect_system = Some(ProtectValue::Switch(true)),
                _ => {}
            },
            "ReadOnlyPaths" | "ReadOnlyDirectories" => self.read_only(entry, draft, file),
            "CapabilityBoundingSet" => {}
            key => match key.strip_prefix("Limit").map(str::to_ascii_lowercase) {
                Some(name) if ulimit_number(&name).is_some() => limit(entry, name, draft, file),
                Some(_) | None => return false,
            },
        }
        true
    }

    fn read_only(&self, entry: &IniEntry, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let Ok(words) = words::split(&entry.value, QuoteStyle::Systemd) else {
            return file.reject(entry.line, format!("{} cannot be read", entry.key), "close the quote");
        };
        for word in words {
            let path = word.trim_start_matches(['-', '+']);
            if word.starts_with('-') {
                file.note(entry.line, &entry.key, format!("`-` is ignored: {path} must exist"));
            }
            let path = words::escaped(&self.expand_specifiers(path, entry, file));
            match path.starts_with('/') {
                true => draft.spec.sandbox.read_only_paths.get_or_insert_default().push(Text(path)),
                false => file.note(entry.line, &entry.key, "not an absolute path; ignored"),
            }
        }
    }

    /// The bounding set. Lists of several lines are merged, `~` removes from the set, and an empty value is the empty set.
    pub(super) fn bounding_set(&self, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let mut set: Option<BTreeSet<String>> = None;
        for entry in self.entries("CapabilityBoundingSet") {
            let (inverted, names) = match entry.value.strip_prefix('~') {
                Some(names) => (true, names),
                None => (false, entry.value.as_str()),
            };
            let mut named = BTreeSet::new();
            for name in names.split_whitespace().map(str::to_ascii_uppercase) {
                match capability_names().any(|known| known == name) {
                    true => drop(named.insert(name)),
                    false => file.note(entry.line, &entry.key, format!("{name} is unknown; ignored")),
                }
            }
            set = Some(match (inverted, set) {
                (true, set) => &set.unwrap_or_else(|| capability_names().collect()) - &named,
                (false, _) if entry.value.is_empty() => named,
                (false, set) => &set.unwrap_or_default() | &named,
            });
        }
        draft.spec.sandbox.capabilities = set.map(|set| set.into_iter().map(Text).collect());
    }

    /// Environment files and the commands before the start.
    pub(super) fn before_start(&self, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
        let files = self.all("EnvironmentFile");
        for (nth, entry) in files.iter().enumerate() {
            let IniEntry { key, value, line } = entry;
            let path = value.trim_start_matches('-');
            if nth > 0 || path.contains(['*', '?', '[']) || !path.starts_with('/') {
                file.note(*line, key, "manifests have one env_file, without patterns: merge the files");
                continue;
            }
            if value.starts_with('-') {
                file.note(*line, key, "`-` is ignored: the file must exist");
            }
            if !self.all("Environment").is_empty() {
                file.note(*line, key, "env overrides env_file; systemd's file overrides Environment");
            }
            draft.spec.env_file = Some(Text(words::escaped(&self.expand_specifiers(path, entry, file))));
        }
        let before = self.all("ExecStartPre");
        if !before.is_empty() {
            draft.spec.before_start = self.sequence(&before, file).map(Text);
        }
    }
}

fn number(
    entry: &IniEntry,
    range: std::ops::RangeInclusive<i32>,
    file: &mut FileReader<'_, '_>,
) -> Option<i64> {
    let value = entry.value.parse::<i32>().ok().filter(|value| range.contains(value));
    if value.is_none() {
        let hint = format!("a whole number from {} to {}", range.start(), range.end());
        file.reject(entry.line, format!("{} is out of range", entry.key), &hint);
    }
    value.map(i64::from)
}

fn limit(entry: &IniEntry, name: String, draft: &mut Draft, file: &mut FileReader<'_, '_>) {
    let value = |text: &str| match (text, name.as_str()) {
        ("infinity", _) => Some(Ulimit::INFINITY),
        (text, "cpu") => span_ms(text).map(|ms| ms.div_ceil(1000)),
        (text, "as" | "core" | "data" | "fsize" | "memlock" | "msgqueue" | "rss" | "stack") => bytes(text),
        // A nice level with a sign; the kernel's limit counts from 20 down.
        (text, "nice") if text.starts_with(['+', '-']) => text
            .parse::<i64>()
            .ok()
            .and_then(|level| u64::try_from(20 - level).ok())
            .filter(|limit| *limit <= 40),
        (text, _) if text.bytes().all(|byte| byte.is_ascii_digit()) => text.parse().ok(),
        _ => None,
    };
    let (soft, hard) = entry.value.split_once(':').unwrap_or((&entry.value, &entry.value));
    let limit = value(soft).zip(value(hard)).filter(|(soft, hard)| soft <= hard);
    let Some((soft, hard)) = limit else {
        return file.note(entry.line, &entry.key, "this value has no equivalent in manifests: set ulimits");
    };
    let limit = Ulimit { soft, hard };
    let entry = match i64::try_from(soft) {
        Ok(both) if soft == hard => TextOrNumber::Number(both),
        _ => TextOrNumber::Text(limit.to_string()),
    };
    draft.spec.sandbox.ulimits.get_or_insert_with(|| Map(Default::default())).0.insert(name, entry);
}

/// Bytes with systemd's units, which are powers of 1024.
fn bytes(text: &str) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let shift = match unit.trim() {
        "" | "B" => 0,
        "K" => 10,
        "M" => 20,
        "G" => 30,
        "T" => 40,
        "P" => 50,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}
