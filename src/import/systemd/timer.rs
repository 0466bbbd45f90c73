//! systemd timers: schedules of services.

use std::sync::Arc;

use super::service::is_true;
use crate::import::calendar::{crontab, seconds, span_ms};
use crate::import::draft::Draft;
use crate::import::ini::{IniEntry, IniSection};
use crate::import::{FileReader, ImportContext};
use crate::manifest::document::Text;
use crate::model::State;

/// Schedule of a service.
pub struct Timer {
    file: Arc<str>,
    line: u32,
    /// Unit name of the service.
    unit: String,
    rule: Option<String>,
    cycle_time: Option<i64>,
}

/// Applies timers to the services of the same import.
pub fn schedule(drafts: &mut [Draft], timers: Vec<Timer>, reader: &mut ImportContext<'_>) {
    for Timer { file, line, unit, rule, cycle_time } in timers {
        let Some(draft) = drafts.iter_mut().find(|draft| draft.alias == unit) else {
            let message = format!("{unit} is not imported in this run, so the timer is ignored");
            reader.note(&file, line, "[Timer]", message);
            continue;
        };
        if rule.is_none() && cycle_time.is_none() {
            continue;
        }
        draft.spec.monitor.auto_type = Some(0);
        draft.state = State::Running;
        draft.spec.monitor.crontab_rule = rule.map(Text);
        draft.spec.cycle_time = cycle_time;
    }
}

pub fn read(name: String, section: &IniSection, file: &mut FileReader<'_, '_>) -> Option<Timer> {
    let stem = name.strip_suffix(".timer").unwrap_or(&name);
    let mut timer = Timer {
        file: file.source.name.clone(),
        line: section.line,
        unit: format!("{stem}.service"),
        rule: None,
        cycle_time: None,
    };
    for IniEntry { key, value, line } in &section.entries {
        match key.as_str() {
            "Unit" => timer.unit.clone_from(value),
            "OnCalendar" if value.is_empty() => timer.rule = None,
            "OnCalendar" if timer.rule.is_some() => {
                file.note(*line, key, "manifests have one crontab_rule; the first is used");
            }
            "OnCalendar" => {
                timer.rule = crontab(value);
                if timer.rule.is_none() {
                    file.note(
                        *line,
                        key,
                        format!("{value:?} has no equivalent crontab rule: set crontab_rule manually"),
                    );
                }
            }
            "OnUnitActiveSec" if let Some(ms) = span_ms(value).filter(|ms| *ms > 0) => {
                timer.cycle_time = Some(seconds(ms).min(366 * 86_400));
            }
            // The agent makes up for missed runs once.
            "Persistent" if is_true(value) => {}
            _ => file.note(*line, key, "no equivalent in manifests"),
        }
    }
    if timer.rule.is_some() && timer.cycle_time.take().is_some() {
        file.note(section.line, "OnUnitActiveSec", "ignored: the crontab_rule of OnCalendar is used");
    }
    Some(timer)
}
