//! What is known now: fed with the loop's events, read by whoever is asked.
//!
//! One lock, held for short moments only; nobody who reads can make the loop wait. What happened is kept as numbered
//! notes, the newest thousand: whoever follows them asks for what came after the number that he knows, and who is too slow
//! is told that he missed some. The numbers go on where those of an earlier run ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use tokio::sync::watch;

use super::source::Reading;
use super::{Event, Look};
use crate::clock;
use crate::execute::Ended;
use crate::manifest::Problem;
pub use crate::manifest::Severity;
use crate::model::{Desired, InstanceKey, Reason, Seen, State, Step, Time, Why};
pub use crate::reconcile::Sync;
use crate::reconcile::standing;

/// So many notes are kept.
pub const KEPT: usize = 1000;
/// Upper bounds of the buckets of durations, in seconds.
pub const BUCKETS: [f64; 10] = [0.005, 0.02, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 900.0];
/// A loop that was not heard of for this long stands still: a target may be that slow to answer.
const STILL: Duration = Duration::from_secs(60);
/// The longest pass, and then some.
const LONGEST: Duration = Duration::from_secs(900);
/// So many texts of a list are told one by one.
const SHOWN: usize = 10;

/// What is watched over, as it was said at the start.
#[derive(Clone, Debug, Default)]
pub struct Subject {
    pub target: String,
    pub owner: String,
    pub sources: Vec<String>,
    pub follow: bool,
    pub heal: bool,
    pub prune: bool,
    pub interval: Duration,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Nobody was asked yet.
    #[default]
    Starting,
    /// Somebody else leads: his host and process.
    Waiting {
        host: String,
        pid: u32,
    },
    Leading {
        generation: u64,
    },
}

/// One instance, as it is wanted and as it was seen.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    pub key: InstanceKey,
    /// `None`: it is not there.
    pub seen: Option<Seen>,
    /// Why its host could not be looked at.
    pub gap: Option<String>,
    pub sync: Sync,
    /// Why it is left alone, and in a sentence.
    pub held: Option<(Reason, String)>,
    /// Where it is declared.
    pub declared: Option<String>,
}

/// Everything that is known at one moment.
#[derive(Clone, Debug)]
pub struct Known {
    pub role: Role,
    pub revision: String,
    /// The commit that it is, where it is one.
    pub commit: Option<String>,
    /// Why the source is not followed: what was last taken stays in force.
    pub not_followed: Option<String>,
    pub files: usize,
    /// Something is broken, and in force as it last was.
    pub is_incomplete: bool,
    pub problems: Arc<[Problem]>,
    pub look: Option<Arc<Look>>,
    pub rows: Arc<[Row]>,
    pub looks: u64,
    pub failed_looks: u64,
    /// How long the last pass took.
    pub passed: Option<Duration>,
    /// Since when one is under way.
    pub passing: Option<Instant>,
    pub turned: Instant,
    /// What went wrong, as long as it does.
    pub trouble: Option<String>,
    /// Steps that are under way or wait for their turn.
    pub queue: usize,
    /// By operation and outcome.
    pub operations: BTreeMap<(&'static str, &'static str), u64>,
    pub passes: Passes,
    /// Of the newest note.
    pub number: u64,
}

/// How long passes took.
#[derive(Clone, Debug, Default)]
pub struct Passes {
    pub buckets: [u64; BUCKETS.len()],
    pub seconds: f64,
    pub all: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Info,
    Warning,
    Error,
}

impl Level {
    pub fn word(self) -> &'static str {
        match self {
            Level::Info => "info",
            Level::Warning => "warning",
            Level::Error => "error",
        }
    }
}

/// What a note is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Read,
    Source,
    Problems,
    Mended,
    Waiting,
    Leading,
    Changed,
    Held,
    NotConverging,
    Doing,
    Step,
    Soaking,
    Relaunched,
    RolledBack,
    Done,
    Trouble,
    Recovered,
    Converged,
    /// Somebody asked for something through the listener.
    Asked,
}

impl Kind {
    pub fn word(self) -> &'static str {
        match self {
            Kind::Read => "read",
            Kind::Source => "source",
            Kind::Problems => "problems",
            Kind::Mended => "mended",
            Kind::Waiting => "waiting",
            Kind::Leading => "leading",
            Kind::Changed => "changed",
            Kind::Held => "held",
            Kind::NotConverging => "not_converging",
            Kind::Doing => "doing",
            Kind::Step => "step",
            Kind::Soaking => "soaking",
            Kind::Relaunched => "relaunched",
            Kind::RolledBack => "rolled_back",
            Kind::Done => "done",
            Kind::Trouble => "trouble",
            Kind::Recovered => "recovered",
            Kind::Converged => "converged",
            Kind::Asked => "asked",
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug)]
pub struct Note {
    pub number: u64,
    pub at: Time,
    pub kind: Kind,
    pub level: Level,
    /// One line.
    pub title: String,
    /// More lines, or none.
    pub text: String,
    /// For programs.
    pub more: Map<String, Value>,
}

impl Note {
    pub fn json(&self) -> Value {
        let mut all = Map::new();
        all.insert("id".to_owned(), self.number.into());
        all.insert("time".to_owned(), self.at.to_string().into());
        all.insert("kind".to_owned(), self.kind.word().into());
        all.insert("level".to_owned(), self.level.word().into());
        all.insert("title".to_owned(), self.title.clone().into());
        all.insert("text".to_owned(), self.text.clone().into());
        all.extend(self.more.iter().map(|(name, value)| (name.clone(), value.clone())));
        Value::Object(all)
    }
}

/// The board itself; one a loop, shared.
pub struct Board {
    pub subject: Subject,
    pub began: Time,
    inner: Mutex<Inner>,
    /// The newest number; who waits for notes waits here. `None`: there will be no more.
    news: watch::Sender<Option<u64>>,
}

struct Inner {
    known: Known,
    notes: VecDeque<Arc<Note>>,
    /// What failed in the pass that is under way, and what was done, by operation.
    failures: Vec<String>,
    did: BTreeMap<&'static str, usize>,
    /// Something happened since everything was as wanted.
    news: bool,
    not_converging: BTreeSet<InstanceKey>,
}

/// Notes after a number.
#[derive(Clone, Debug, Default)]
pub struct Later {
    pub notes: Vec<Arc<Note>>,
    /// Some that came after that number are no longer kept.
    pub missed: bool,
}

impl Board {
    pub fn new(subject: Subject) -> Board {
        let began = clock::moment();
        // Far above what an earlier run can have counted to.
        let number = u64::try_from(began.0).unwrap_or(0);
        let known = Known {
            role: Role::Starting,
            revision: String::new(),
            commit: None,
            not_followed: None,
            files: 0,
            is_incomplete: false,
            problems: Arc::new([]),
            look: None,
            rows: Arc::new([]),
            looks: 0,
            failed_looks: 0,
            passed: None,
            passing: None,
            turned: Instant::now(),
            trouble: None,
            queue: 0,
            operations: BTreeMap::new(),
            passes: Passes::default(),
            number,
        };
        let inner = Inner {
            known,
            notes: VecDeque::new(),
            failures: Vec::new(),
            did: BTreeMap::new(),
            news: true,
            not_converging: BTreeSet::new(),
        };
        Board { subject, began, inner: Mutex::new(inner), news: watch::Sender::new(Some(number)) }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn known(&self) -> Known {
        self.inner().known.clone()
    }

    pub fn is_alive(&self) -> bool {
        self.is_turning(STILL, LONGEST)
    }

    /// Does the loop go round? A pass may take as long as it was given.
    fn is_turning(&self, within: Duration, longest_pass: Duration) -> bool {
        let known = &self.inner().known;
        match known.passing {
            Some(since) => since.elapsed() < longest_pass,
            None => known.turned.elapsed() < within,
        }
    }

    /// At most `most` notes that came after a number.
    pub fn after(&self, number: u64, most: usize) -> Later {
        let inner = self.inner();
        let first = inner.notes.front().map_or(inner.known.number, |note| note.number - 1);
        let skipped = usize::try_from(number.saturating_sub(first)).unwrap_or(usize::MAX);
        Later {
            notes: inner.notes.iter().skip(skipped).take(most).cloned().collect(),
            missed: number < first,
        }
    }

    /// Where to wait for notes.
    pub fn news(&self) -> watch::Receiver<Option<u64>> {
        self.news.subscribe()
    }

    /// There will be no more: whoever waits ends.
    pub fn close(&self) {
        self.news.send_replace(None);
    }

    /// Somebody asked for something.
    pub fn asked(&self, title: String) {
        self.put(|inner| inner.note(Kind::Asked, Level::Info, title, String::new(), json!({})));
    }

    /// Takes in what happened.
    pub fn note(&self, event: &Event<'_>) {
        // What takes time is done before the lock is taken.
        let rows = match event {
            Event::Planned { look, desired } => Some(rows(look, desired)),
            _ => None,
        };
        self.put(|inner| inner.take(event, rows));
    }

    fn put(&self, change: impl FnOnce(&mut Inner)) {
        let number = {
            let mut inner = self.inner();
            change(&mut inner);
            inner.known.number
        };
        self.news.send_if_modified(|last| match last {
            Some(last) if *last != number => {
                *last = number;
                true
            }
            Some(_) | None => false,
        });
    }
}

impl Inner {
    fn note(&mut self, kind: Kind, level: Level, title: String, text: String, more: Value) {
        self.known.number += 1;
        let more = match more {
            Value::Object(map) => map,
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => {
                Map::new()
            }
        };
        let number = self.known.number;
        let note = Note { number, at: clock::moment(), kind, level, title, text, more };
        self.notes.push_back(Arc::new(note));
        if self.notes.len() > KEPT {
            self.notes.pop_front();
        }
    }

    fn take(&mut self, event: &Event<'_>, rows: Option<Vec<Row>>) {
        self.known.turned = Instant::now();
        let plain = String::new;
        match event {
            Event::Read { reading, revision } => self.read(reading, revision),
            Event::Source { trouble: None } => {
                self.known.not_followed = None;
                let title = "the source is followed again".to_owned();
                self.note(Kind::Source, Level::Info, title, plain(), json!({"trouble": null}));
            }
            Event::Source { trouble: Some(trouble) } => {
                let title = format!("the source is not followed: {}: {trouble}", trouble.word());
                self.known.not_followed = Some(format!("{}: {trouble}", trouble.word()));
                let more = json!({"trouble": trouble.word()});
                self.note(Kind::Source, Level::Error, title, trouble.hint().unwrap_or_default(), more);
            }
            Event::Pinned { pin } => {
                let title = format!("pinned to {} by {}", pin.revision, pin.by);
                let more = json!({"pinned": pin.revision, "by": pin.by, "reason": pin.reason});
                self.note(Kind::Source, Level::Info, title, pin.reason.clone().unwrap_or_default(), more);
            }
            Event::Unpinned { pin, newer } => {
                let why = if *newer { ": the source has something newer" } else { "" };
                let title = format!("no longer pinned to {}{why}", pin.revision);
                self.note(Kind::Source, Level::Info, title, plain(), json!({"pinned": null}));
            }
            Event::Waiting { holder } => {
                let (host, pid) = (holder.host.clone(), holder.pid);
                let title = format!("waiting: {host} (process {pid}) leads");
                self.note(Kind::Waiting, Level::Info, title, plain(), json!({"host": host, "pid": pid}));
                self.known.role = Role::Waiting { host, pid };
            }
            Event::Leading { generation } => {
                self.known.role = Role::Leading { generation: *generation };
                let more = json!({"generation": generation});
                self.note(Kind::Leading, Level::Info, "this one leads".to_owned(), plain(), more);
            }
            Event::Planned { look, .. } => self.planned(look, rows.unwrap_or_default()),
            Event::Doing { steps } => {
                self.known.queue = *steps;
                (self.failures, self.did) = (Vec::new(), BTreeMap::new());
                let title = format!("{} to do", count(*steps, "step"));
                self.note(Kind::Doing, Level::Info, title, plain(), json!({"steps": steps}));
            }
            Event::Ended { step, ended } => self.ended(step, ended),
            Event::Soaking { process, secs } => {
                let title = format!("{process}: watching for {secs} s whether it stays well");
                let more = json!({"process": process.to_string(), "secs": secs});
                self.note(Kind::Soaking, Level::Info, title, plain(), more);
            }
            Event::Relaunched { instance, pid } => {
                let title = format!("{instance}: it ended, and is back as process {pid}");
                let more = json!({"instance": instance, "pid": pid});
                self.note(Kind::Relaunched, Level::Info, title, plain(), more);
            }
            Event::RolledBack { processes } => {
                let title = format!("{processes}: the rollout failed, and is rolled back");
                let more = json!({"processes": processes});
                self.note(Kind::RolledBack, Level::Error, title, plain(), more);
            }
            Event::Did { steps, took } => self.did(*steps, *took),
            Event::Trouble { why } => {
                self.known.failed_looks += 1;
                if self.known.trouble.as_deref() != Some(*why) {
                    self.known.trouble = Some((*why).to_owned());
                    let title = (*why).to_owned();
                    self.note(Kind::Trouble, Level::Error, title, plain(), json!({}));
                }
            }
            Event::Rested { settled, held } => {
                if std::mem::take(&mut self.news) {
                    let rest = if *held > 0 { format!(", {held} held") } else { String::new() };
                    let title = format!("converged: {} as wanted{rest}", count(*settled, "instance"));
                    let more = json!({"settled": settled, "held": held});
                    self.note(Kind::Converged, Level::Info, title, plain(), more);
                }
            }
            Event::Passing => self.known.passing = Some(Instant::now()),
            Event::Passed { took } => self.passed(*took),
            Event::Turned => {}
        }
    }

    fn read(&mut self, reading: &Reading, revision: &str) {
        let errors = errors(&reading.problems);
        let before = self::errors(&self.known.problems);
        let more = json!({"revision": revision, "commit": reading.commit, "instances": reading.desired.instances.len(), "files": reading.files,
                          "errors": errors.len()});
        if revision != self.known.revision || reading.commit != self.known.commit {
            self.news = true;
            let short: String = revision.chars().take(12).collect();
            let many = count(reading.desired.instances.len(), "instance");
            let commit =
                reading.commit.as_deref().map(|id| format!(", commit {}", id.get(..12).unwrap_or(id)));
            let title = format!("read: {many} wanted, revision {short}{}", commit.unwrap_or_default());
            self.note(Kind::Read, Level::Info, title, String::new(), more.clone());
        }
        if !errors.is_empty() && errors != before {
            let title = format!(
                "{} in the manifests: what is broken stays as it last was",
                count(errors.len(), "error")
            );
            self.note(Kind::Problems, Level::Error, title, list(&errors), more);
        } else if errors.is_empty() && !before.is_empty() {
            let title = "the manifests have no errors any more".to_owned();
            self.note(Kind::Mended, Level::Info, title, String::new(), more);
        }
        self.known.revision = revision.to_owned();
        self.known.commit.clone_from(&reading.commit);
        self.known.files = reading.files;
        self.known.is_incomplete = reading.is_incomplete;
        self.known.problems = reading.problems.clone().into();
    }

    fn planned(&mut self, look: &Arc<Look>, rows: Vec<Row>) {
        self.known.looks += 1;
        if self.known.trouble.take().is_some() {
            let title = "the target can be looked at again".to_owned();
            self.note(Kind::Recovered, Level::Info, title, String::new(), json!({}));
        }
        let now = held(look);
        let before = self.known.look.as_ref().map(|look| held(look)).unwrap_or_default();
        if now != before {
            let (title, level) = match now.len() {
                0 => ("nothing is held any more".to_owned(), Level::Info),
                many => (format!("{} held", count(many, "instance")), Level::Warning),
            };
            self.note(Kind::Held, level, title, list(&now), json!({"held": now.len()}));
        }
        let stuck: BTreeSet<InstanceKey> = look
            .rules
            .left_alone
            .iter()
            .filter(|(_, (reason, _))| *reason == Reason::NotConverging)
            .map(|(key, _)| key.clone())
            .collect();
        let new: Vec<String> = stuck.difference(&self.not_converging).map(ToString::to_string).collect();
        if !new.is_empty() {
            let many = count(new.len(), "instance");
            let title = format!("{many} not converging: made as wanted three times, and undone each time");
            let more = json!({"instances": new});
            self.note(Kind::NotConverging, Level::Error, title, list(&new), more);
        }
        self.not_converging = stuck;
        let changed = changes(&self.known.rows, &rows);
        if changed > 0 && self.known.look.is_some() {
            let title = format!("{} changed", count(changed, "instance"));
            self.note(Kind::Changed, Level::Info, title, String::new(), json!({"instances": changed}));
        }
        self.known.look = Some(Arc::clone(look));
        self.known.rows = rows.into();
    }

    fn ended(&mut self, step: &Step, ended: &Ended) {
        self.known.queue = self.known.queue.saturating_sub(1);
        let (op, outcome) = (step.op.word(), ended.outcome);
        *self.known.operations.entry((op, outcome.word())).or_default() += 1;
        let why = step.why.first();
        let mut title = format!("{op} {}", step.instance);
        if outcome.is_well() {
            *self.did.entry(op).or_default() += 1;
            title.extend(why.map(|why| format!(": {}", because(why))));
        } else {
            title =
                format!("{title}: {} {}", outcome.word(), ended.message.lines().next().unwrap_or_default());
            self.failures.push(title.clone());
        }
        let level = if outcome.is_well() { Level::Info } else { Level::Error };
        let at = why.and_then(|why| why.at.as_ref()).map(ToString::to_string);
        let more = json!({"instance": step.instance, "op": op, "outcome": outcome.word(), "code": ended.code,
                          "message": ended.message, "took_ms": ended.took_ms, "at": at});
        self.note(Kind::Step, level, title, String::new(), more);
    }

    fn did(&mut self, steps: usize, took: Duration) {
        self.known.queue = 0;
        self.news = true;
        let (failures, did) = (std::mem::take(&mut self.failures), std::mem::take(&mut self.did));
        let summary: Map<String, Value> =
            did.iter().map(|(op, many)| ((*op).to_owned(), (*many).into())).collect();
        let mut words: Vec<String> = did.iter().map(|(op, many)| format!("{many} {op}")).collect();
        if !failures.is_empty() {
            words.push(format!("{} failed", failures.len()));
        }
        let title = format!("{} in {:.1} s: {}", count(steps, "step"), took.as_secs_f64(), words.join(", "));
        let level = if failures.is_empty() { Level::Info } else { Level::Error };
        let more = json!({"steps": steps, "took_ms": u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
                          "summary": summary, "failed": failures.len()});
        self.note(Kind::Done, level, title, list(&failures), more);
    }

    fn passed(&mut self, took: Duration) {
        self.known.passing = None;
        self.known.queue = 0;
        self.known.passed = Some(took);
        let seconds = took.as_secs_f64();
        if let Some(bucket) = BUCKETS.iter().position(|most| seconds <= *most) {
            self.known.passes.buckets[bucket] += 1;
        }
        self.known.passes.seconds += seconds;
        self.known.passes.all += 1;
    }
}

/// Every instance that is wanted or was seen.
fn rows(look: &Look, desired: &Desired) -> Vec<Row> {
    let Look { observed, rules, plan, .. } = look;
    let held: BTreeMap<&InstanceKey, (Reason, &String)> =
        plan.held.iter().map(|held| (&held.instance, (held.reason, &held.detail))).collect();
    let row = |(key, sync): (&InstanceKey, Sync)| Row {
        key: key.clone(),
        seen: observed.instances.get(key).cloned(),
        gap: observed.gaps.get(&key.host).cloned(),
        sync,
        held: held.get(key).map(|(reason, detail)| (*reason, (*detail).clone())),
        declared: desired
            .instances
            .get(key)
            .filter(|want| want.origin.state != State::Absent)
            .map(|want| want.origin.place.to_string()),
    };
    standing(desired, observed, plan, rules).into_iter().map(row).collect()
}

/// What is left alone, a line each. What only waits for its next try comes and goes, and is told as it fails.
fn held(look: &Look) -> Vec<String> {
    let waits: BTreeSet<&InstanceKey> =
        look.backing_off.iter().filter(|hold| hold.until.is_some()).map(|hold| &hold.instance).collect();
    let stays = look.plan.held.iter().filter(|held| !waits.contains(&held.instance));
    stays.map(|held| format!("{} {}: {}", held.reason.word(), held.instance, held.detail)).collect()
}

/// How many rows are not what they were. When they were told is no part of that.
fn changes(before: &[Row], now: &[Row]) -> usize {
    let facts = |row: &Row| {
        let seen =
            row.seen.as_ref().map(|seen| (seen.running, seen.hosted, seen.registered, seen.health, seen.pid));
        (row.sync, seen, row.gap.is_some())
    };
    let known: BTreeMap<&InstanceKey, &Row> = before.iter().map(|row| (&row.key, row)).collect();
    let differ =
        now.iter().filter(|row| known.get(&row.key).is_none_or(|old| facts(old) != facts(row))).count();
    let stay = now.iter().filter(|row| known.contains_key(&row.key)).count();
    differ + before.len().saturating_sub(stay)
}

fn errors(problems: &[Problem]) -> Vec<String> {
    let errors = problems.iter().filter(|problem| problem.severity == Severity::Error);
    errors.map(|problem| format!("{}:{}: {}", problem.file, problem.line, problem.message)).collect()
}

fn because(why: &Why) -> String {
    let side = |value: &Option<String>| value.clone().unwrap_or_else(|| "unset".to_owned());
    match &why.field {
        Some(field) => format!("{field}: {} → {}", side(&why.old), side(&why.new)),
        None => why.rule.word().to_owned(),
    }
}

/// The first lines of many.
fn list(lines: &[String]) -> String {
    let mut text = lines.iter().take(SHOWN).cloned().collect::<Vec<_>>().join("\n");
    if lines.len() > SHOWN {
        text.push_str(&format!("\nand {} more", lines.len() - SHOWN));
    }
    text
}

fn count(n: usize, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_numbered_and_who_is_too_slow_is_told() {
        let board = Board::new(Subject::default());
        let begin = board.known().number;
        assert!(board.after(begin, 10).notes.is_empty() && !board.after(begin, 10).missed);
        let mut news = board.news();
        for nth in 0..KEPT + 5 {
            board.note(&Event::Trouble { why: &format!("trouble {nth}") });
        }
        assert!(news.has_changed().is_ok_and(|changed| changed));
        assert_eq!(*news.borrow_and_update(), Some(begin + KEPT as u64 + 5));
        let all = board.after(begin, usize::MAX);
        assert!(all.missed && all.notes.len() == KEPT);
        let last = board.after(begin + KEPT as u64 + 3, usize::MAX);
        assert!(!last.missed);
        let titles: Vec<&str> = last.notes.iter().map(|note| note.title.as_str()).collect();
        assert_eq!(titles, ["trouble 1003", "trouble 1004"]);
        assert!(board.after(u64::MAX, 10).notes.is_empty(), "of another run");
        board.note(&Event::Trouble { why: "trouble 1004" });
        assert!(!news.has_changed().is_ok_and(|changed| changed), "the same again is no news");
    }

    #[test]
    fn a_loop_that_stands_still_is_noticed() {
        let board = Board::new(Subject::default());
        let (short, long) = (Duration::from_secs(5), Duration::from_secs(600));
        assert!(board.is_turning(short, long));
        assert!(!board.is_turning(Duration::ZERO, long));
        board.note(&Event::Passing);
        assert!(board.is_turning(Duration::ZERO, long), "a pass takes its time");
        assert!(!board.is_turning(short, Duration::ZERO), "and not for ever");
        board.note(&Event::Passed { took: Duration::from_millis(7) });
        assert_eq!(board.known().passes.buckets[1], 1);
    }
}
