//! Effect of each event on the status board, and its log entry.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::log::{HIDDEN, Kind, LogEntry, LogLevel, is_private, may_quote};
use super::{ControllerEvent, Inner, MAX_ENTRIES, PassResult, Pin, Role, SourceState};
use crate::clock;
use crate::contract::EventDetails;
use crate::execute::StepResult;
use crate::manifest::{Problem, Severity};
use crate::model::{HoldReason, InstanceKey, ManifestRevision, Reason, Step, count};
use crate::source::SourceError;

/// Maximum number of texts listed per entry.
const MAX_LISTED: usize = 10;

impl Inner {
    pub(super) fn log(
        &mut self,
        kind: Kind,
        level: LogLevel,
        title: String,
        text: String,
        details: EventDetails,
    ) {
        self.known.number += 1;
        let number = self.known.number;
        let note = LogEntry { number, at: clock::now(), kind, level, title, text, details, public: None };
        self.notes.push_back(Arc::new(note));
        if self.notes.len() > MAX_ENTRIES {
            self.notes.pop_front();
        }
    }

    /// The last entry has another title and text for readers without credentials.
    fn set_public_text(&mut self, title: String, text: String) {
        if let Some(note) = self.notes.back_mut() {
            Arc::make_mut(note).public = Some((title, text));
        }
    }

    /// `changed`: number of instances that changed since the last pass.
    pub(super) fn apply(&mut self, event: &ControllerEvent<'_>, changed: usize) {
        self.known.last_tick = Instant::now();
        let plain = String::new;
        match event {
            ControllerEvent::Read { reading, revision } => self.on_source_read(reading, revision),
            ControllerEvent::Problems { reading } => self.on_problems(reading),
            ControllerEvent::RevisionNotFollowed { revision } => self.on_not_followed(*revision),
            ControllerEvent::Source { trouble } => self.on_source_error(*trouble),
            ControllerEvent::Pinned { pin } => self.on_pinned(pin),
            ControllerEvent::Unpinned { pin, newer } => self.on_unpinned(pin, *newer),
            ControllerEvent::Waiting { holder } => {
                let (host, pid) = (holder.host.clone(), holder.pid);
                let title = format!("standby: {host} (pid {pid}) leads");
                let more = EventDetails::Waiting { host: host.clone(), pid };
                self.log(Kind::Waiting, LogLevel::Info, title, plain(), more);
                self.known.role = Role::Waiting { host, pid };
            }
            ControllerEvent::Leading { generation } => {
                self.known.role = Role::Leading { generation: *generation };
                let more = EventDetails::Leading { generation: *generation };
                self.log(Kind::Leading, LogLevel::Info, "leadership acquired".to_owned(), plain(), more);
            }
            ControllerEvent::Planned { result } => self.on_planned(result, changed),
            ControllerEvent::ExecutionStarted { steps } => {
                self.known.work.queue += steps;
                self.known.work.in_flight += 1;
                let title = format!("executing {}", count(*steps, "step"));
                let more = EventDetails::ExecutionStarted { steps: *steps };
                self.log(Kind::ExecutionStarted, LogLevel::Info, title, plain(), more);
            }
            ControllerEvent::StepFinished { step, ended } => self.on_step_finished(step, ended),
            ControllerEvent::Soaking { process, secs } => {
                let title = format!("{process}: soaking for {secs} s");
                let more = EventDetails::Soaking { process: process.to_string(), secs: *secs };
                self.log(Kind::Soaking, LogLevel::Info, title, plain(), more);
            }
            ControllerEvent::Relaunched { instance, pid } => {
                let title = format!("{instance}: relaunched as process {pid}");
                let more = EventDetails::Relaunched { instance: (*instance).clone(), pid: *pid };
                self.log(Kind::Relaunched, LogLevel::Info, title, plain(), more);
            }
            ControllerEvent::RolledBack { processes, why, steps } => {
                self.known.work.queue += steps;
                let title = format!("{processes}: rollout failed; rolling back");
                let more =
                    EventDetails::RolledBack { processes: processes.to_string(), why: why.to_string() };
                self.log(Kind::RolledBack, LogLevel::Error, title.clone(), why.to_string(), more);
                self.set_public_text(title, plain());
            }
            ControllerEvent::ExecutionFinished { ended, took } => self.on_execution_finished(ended, *took),
            ControllerEvent::Failure { why } => self.on_failure(why),
            ControllerEvent::Idle { settled, held } => {
                if std::mem::take(&mut self.has_changed) {
                    let rest = if *held > 0 { format!(", {held} held") } else { String::new() };
                    let word = if *held > 0 { "idle" } else { "converged" };
                    let title = format!("{word}: {} as wanted{rest}", count(*settled, "instance"));
                    let more = EventDetails::Converged { settled: *settled, held: *held };
                    self.log(Kind::Converged, LogLevel::Info, title, plain(), more);
                }
            }
            ControllerEvent::PassStarted => self.known.pass.started = Some(Instant::now()),
            ControllerEvent::PassFinished { took } => self.on_pass_finished(*took),
            ControllerEvent::Tick => {}
        }
    }

    fn on_pinned(&mut self, pin: &Pin) {
        self.known.source.pin = Some(pin.clone());
        let title = format!("pinned to {} by {}", pin.revision, pin.by);
        let more = EventDetails::Pinned {
            pinned: pin.revision.to_string(),
            by: pin.by.clone(),
            reason: pin.reason.clone(),
        };
        self.log(Kind::Source, LogLevel::Info, title, pin.reason.clone().unwrap_or_default(), more);
    }

    fn on_unpinned(&mut self, pin: &Pin, newer: bool) {
        self.known.source.pin = None;
        let why = if newer { ": the source has a newer revision" } else { "" };
        let title = format!("no longer pinned to {}{why}", pin.revision);
        self.log(Kind::Source, LogLevel::Info, title, String::new(), EventDetails::Unpinned { pinned: None });
    }

    fn on_not_followed(&mut self, revision: Option<&ManifestRevision>) {
        let title = match revision {
            Some(revision) => {
                let short = revision.short();
                format!("revision {short} is available but not followed (--follow no)")
            }
            None => "the source is at the active revision again".to_owned(),
        };
        self.known.source.not_followed = revision.map(|_| format!("FollowOff: {title}"));
        self.known.source.is_follow_off = revision.is_some();
        let more = EventDetails::NotFollowed { unfollowed: revision.map(ToString::to_string) };
        self.log(Kind::Source, LogLevel::Info, title, String::new(), more);
    }

    fn on_source_error(&mut self, error: Option<&SourceError>) {
        self.known.source.is_follow_off = false;
        let Some(error) = error else {
            self.known.source.not_followed = None;
            let title = "the source is followed again".to_owned();
            let more = EventDetails::SourceError { trouble: None };
            return self.log(Kind::Source, LogLevel::Info, title, String::new(), more);
        };
        let title = format!("the source is not followed: {}: {error}", error.word());
        self.known.source.not_followed = Some(format!("{}: {error}", error.word()));
        let more = EventDetails::SourceError { trouble: Some(error.word().to_owned()) };
        self.log(Kind::Source, LogLevel::Error, title, error.hint().unwrap_or_default(), more);
    }

    fn on_failure(&mut self, why: &str) {
        self.known.pass.failed_observations += 1;
        if self.known.trouble.as_deref() != Some(why) {
            self.known.trouble = Some(why.to_owned());
            self.log(Kind::Failure, LogLevel::Error, why.to_owned(), String::new(), EventDetails::Nothing {});
        }
    }

    fn on_source_read(&mut self, reading: &SourceState, revision: &ManifestRevision) {
        let more = EventDetails::Read {
            revision: revision.to_string(),
            commit: reading.commit.clone(),
            instances: reading.desired.instances.len(),
            files: reading.files,
            errors: errors(&reading.problems).len(),
        };
        if *revision != self.known.source.revision || reading.commit != self.known.source.commit {
            self.has_changed = true;
            let short = revision.short();
            let many = count(reading.desired.instances.len(), "instance");
            let commit =
                reading.commit.as_deref().map(|id| format!(", commit {}", id.get(..12).unwrap_or(id)));
            let title = format!("read {many}, revision {short}{}", commit.unwrap_or_default());
            self.log(Kind::Read, LogLevel::Info, title, String::new(), more);
        }
        self.on_problems(reading);
        self.known.source.revision = revision.clone();
        self.known.source.commit.clone_from(&reading.commit);
        self.known.source.files = reading.files;
    }

    fn on_problems(&mut self, reading: &SourceState) {
        let (errors, before) = (errors(&reading.problems), errors(&self.known.source.problems));
        let more = EventDetails::Problems { errors: errors.len() };
        if !errors.is_empty() && errors != before {
            let title = format!(
                "{} in the manifests: the last good version of invalid files stays active",
                count(errors.len(), "error")
            );
            let public: Vec<String> = errors_of(&reading.problems, |message| match may_quote(message) {
                true => HIDDEN,
                false => message,
            });
            self.log(Kind::Problems, LogLevel::Error, title.clone(), list(&errors), more);
            self.set_public_text(title, list(&public));
        } else if errors.is_empty() && !before.is_empty() {
            let title = "manifest errors resolved".to_owned();
            self.log(Kind::ProblemsFixed, LogLevel::Info, title, String::new(), more);
        }
        self.known.source.is_incomplete = reading.is_incomplete;
        self.known.source.problems = reading.problems.clone().into();
    }

    fn on_planned(&mut self, pass: &Arc<PassResult>, changed: usize) {
        self.known.pass.observations += 1;
        if self.known.trouble.take().is_some() {
            let title = "the target is reachable again".to_owned();
            self.log(Kind::Recovered, LogLevel::Info, title, String::new(), EventDetails::Nothing {});
        }
        let now = held_lines(pass);
        let before = self.known.pass.last.as_ref().map(|pass| held_lines(pass)).unwrap_or_default();
        if now != before {
            let (title, level) = match now.len() {
                0 => ("no instance is held".to_owned(), LogLevel::Info),
                many => (format!("{} held", count(many, "instance")), LogLevel::Warning),
            };
            self.log(Kind::Held, level, title, list(&now), EventDetails::Held { held: now.len() });
        }
        let stuck: BTreeSet<InstanceKey> = pass
            .rules
            .holds
            .by_controller
            .iter()
            .filter(|(_, (reason, _))| *reason == HoldReason::NotConverging)
            .map(|(key, _)| key.clone())
            .collect();
        let new: Vec<String> = stuck.difference(&self.not_converging).map(ToString::to_string).collect();
        if !new.is_empty() {
            let many = count(new.len(), "instance");
            let title = format!(
                "{many} not converging: the same operations succeeded three times, and each time the difference returned"
            );
            let text = list(&new);
            let more = EventDetails::NotConverging { instances: new };
            self.log(Kind::NotConverging, LogLevel::Error, title, text, more);
        }
        self.not_converging = stuck;
        if changed > 0 {
            let title = format!("{} changed", count(changed, "instance"));
            let more = EventDetails::Changed { instances: changed };
            self.log(Kind::Changed, LogLevel::Info, title, String::new(), more);
        }
        self.known.pass.last = Some(Arc::clone(pass));
    }

    fn on_step_finished(&mut self, step: &Step, ended: &StepResult) {
        self.known.work.queue = self.known.work.queue.saturating_sub(1);
        let (op, outcome) = (step.op.word(), ended.outcome);
        *self.known.work.operations.entry((op, outcome.word())).or_default() += 1;
        let why = step.why.first();
        let mut title = format!("{op} {}", step.instance);
        match outcome.is_well() {
            true => title.extend(why.map(|why| format!(": {}", reason_text(why)))),
            false => title = failure(ended),
        }
        let level = if outcome.is_well() { LogLevel::Info } else { LogLevel::Error };
        let at = why.and_then(|why| why.at.as_ref()).map(ToString::to_string);
        let more = EventDetails::Step {
            instance: step.instance.clone(),
            op: step.op,
            outcome,
            code: ended.code,
            message: ended.message.clone(),
            took_ms: ended.took_ms,
            at,
        };
        self.log(Kind::Step, level, title, String::new(), more);
        let mut public = format!("{op} {}", step.instance);
        match outcome.is_well() {
            true => public.extend(why.map(|why| format!(": {}", redacted_reason(why)))),
            false => public = failure(&without_message(ended)),
        }
        self.set_public_text(public, String::new());
    }

    fn on_execution_finished(&mut self, ended: &[StepResult], took: Duration) {
        self.has_changed = true;
        self.known.work.in_flight = self.known.work.in_flight.saturating_sub(1);
        let mut summary: BTreeMap<&str, usize> = BTreeMap::new();
        for one in ended.iter().filter(|one| one.outcome.is_well()) {
            *summary.entry(one.op.word()).or_default() += 1;
        }
        let failures: Vec<String> = ended.iter().filter(|one| !one.outcome.is_well()).map(failure).collect();
        let mut words: Vec<String> = summary.iter().map(|(op, many)| format!("{many} {op}")).collect();
        if !failures.is_empty() {
            words.push(format!("{} failed", failures.len()));
        }
        let (steps, secs) = (count(ended.len(), "step"), took.as_secs_f64());
        let title = format!("{steps} in {secs:.1} s: {}", words.join(", "));
        let level = if failures.is_empty() { LogLevel::Info } else { LogLevel::Error };
        let more = EventDetails::ExecutionFinished {
            steps: ended.len(),
            took_ms: u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
            summary: summary.iter().map(|(op, many)| ((*op).to_owned(), *many)).collect(),
            failed: failures.len(),
        };
        let done = ended
            .iter()
            .filter(|one| one.outcome.is_well())
            .map(|one| format!("{} {}", one.op, one.instance));
        let lines: Vec<String> = failures.into_iter().chain(done).collect();
        let hidden = |one: &StepResult| match one.outcome.is_well() {
            true => format!("{} {}", one.op, one.instance),
            false => failure(&without_message(one)),
        };
        let mut public: Vec<&StepResult> = ended.iter().collect();
        public.sort_by_key(|one| one.outcome.is_well());
        let public: Vec<String> = public.into_iter().map(hidden).collect();
        self.log(Kind::ExecutionFinished, level, title.clone(), list(&lines), more);
        self.set_public_text(title, list(&public));
        self.known.work.durations.observe(took);
    }

    fn on_pass_finished(&mut self, took: Duration) {
        self.known.pass.started = None;
        self.known.pass.duration = Some(took);
        self.known.pass.durations.observe(took);
    }
}

/// Held instances, one line each. Instances that only back off are left out: their failure is logged.
fn held_lines(pass: &PassResult) -> Vec<String> {
    let waits: BTreeSet<&InstanceKey> =
        pass.backing_off.iter().filter(|hold| hold.until.is_some()).map(|hold| &hold.instance).collect();
    let stays = pass.plan.held.iter().filter(|held| !waits.contains(&held.instance));
    let stays = stays.filter(|held| held.reason != HoldReason::UnderWay);
    stays.map(|held| format!("{} {}: {}", held.reason.word(), held.instance, held.detail)).collect()
}

fn errors(problems: &[Problem]) -> Vec<String> {
    errors_of(problems, |message| message)
}

fn errors_of(problems: &[Problem], shown: impl Fn(&str) -> &str) -> Vec<String> {
    let errors = problems.iter().filter(|problem| problem.severity == Severity::Error);
    errors.map(|problem| format!("{}:{}: {}", problem.file, problem.line, shown(&problem.message))).collect()
}

/// An agent's message may quote a command and its output.
fn without_message(ended: &StepResult) -> StepResult {
    let message = if ended.message.is_empty() { String::new() } else { HIDDEN.to_owned() };
    StepResult { message, ..ended.clone() }
}

fn redacted_reason(why: &Reason) -> String {
    let hide = |value: &Option<String>| value.as_ref().map(|_| HIDDEN.to_owned());
    match why.field.as_deref().is_some_and(is_private) {
        true => reason_text(&Reason { old: hide(&why.old), new: hide(&why.new), ..why.clone() }),
        false => reason_text(why),
    }
}

fn failure(ended: &StepResult) -> String {
    let StepResult { op, instance, outcome, message, .. } = ended;
    format!("{op} {instance}: {} {}", outcome.word(), message.lines().next().unwrap_or_default())
}

fn reason_text(why: &Reason) -> String {
    let side = |value: &Option<String>| value.clone().unwrap_or_else(|| "unset".to_owned());
    match &why.field {
        Some(field) => format!("{field}: {} → {}", side(&why.old), side(&why.new)),
        None => why.rule.word().to_owned(),
    }
}

/// The first lines of many.
fn list(lines: &[String]) -> String {
    let mut text = lines.iter().take(MAX_LISTED).cloned().collect::<Vec<_>>().join("\n");
    if lines.len() > MAX_LISTED {
        text.push_str(&format!("\nand {} more", lines.len() - MAX_LISTED));
    }
    text
}
