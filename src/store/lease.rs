//! Leases: who may act, and under which number. A number is never given twice, so whoever carries an older one can be
//! told to look again.

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The longest that a lease lives without a renewal, whatever its holder asks for.
pub const MAX_TTL: Duration = Duration::from_secs(60);
/// No lease has a greater generation: a greater number in a record or a request is forged. JSON readers hold it exactly.
pub const MAX_GENERATION: u64 = 1 << 53;
/// The greatest generation that an administrator may set: far enough below [`MAX_GENERATION`] to never reach it.
pub const MAX_RESET: u64 = 1 << 52;
/// How far above the store's own number an agent's report may raise the next generation.
const MAX_STEP: u64 = 1 << 20;

/// Who asks for a lease: enough to prove that a holder on this machine is dead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Different for every process that asks.
    pub id: String,
    pub host: String,
    /// Of the running kernel: after a reboot nobody from before is alive.
    pub boot_id: String,
    pub pid: u32,
    /// When the process began, in ticks of the kernel: a pid alone may be somebody else's by now.
    pub started: u64,
    /// A digest of the machine's own number, where it has one: names are given twice.
    #[serde(default)]
    pub machine: String,
    /// Which space of pids `pid` is from: every container counts from 1. 0: it was not said.
    #[serde(default)]
    pub pids: u64,
    /// When it first asked, in milliseconds since 1970, for whoever waits for it.
    #[serde(default)]
    pub since: i64,
}

impl Holder {
    /// This process.
    pub fn this(id: impl Into<String>) -> Holder {
        let pid = std::process::id();
        Holder {
            id: id.into(),
            host: host_name(),
            boot_id: boot_id(),
            pid,
            started: started(pid).unwrap_or(0),
            machine: machine(),
            pids: pids(),
            since: now_ms(),
        }
    }

    /// Is it certain that this holder is gone? Of another machine, or of another's pids, nothing is certain.
    pub fn is_dead(&self) -> bool {
        if self.host != host_name() || self.pids == 0 || self.pids != pids() {
            return false;
        }
        match self.boot_id == boot_id() {
            true => started(self.pid) != Some(self.started),
            // It was before a boot of this machine, if it is this machine.
            false => !self.machine.is_empty() && self.machine == machine(),
        }
    }

    /// Is it the same process, asking for the same?
    fn is(&self, other: &Holder) -> bool {
        let who = |holder: &Holder| (holder.pid, holder.started, holder.pids);
        self.id == other.id
            && self.host == other.host
            && self.boot_id == other.boot_id
            && who(self) == who(other)
    }
}

/// A lease that is ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    pub name: String,
    pub holder: String,
    pub generation: u64,
}

/// What became of asking for a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaseAttempt {
    Ours(Lease),
    /// Somebody has it; `left_ms`: for that much longer, unless it is renewed.
    Theirs {
        holder: Holder,
        generation: u64,
        left_ms: u64,
    },
}

/// What is kept of a lease. A lease that nobody holds keeps its number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub generation: u64,
    pub holder: Option<Holder>,
    /// Milliseconds since 1970.
    pub expires: i64,
    /// A host's agent knows this generation: the next one is above it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub floor: u64,
}

fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// What became of resetting a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reset {
    /// It is free. `generation`: the last one, which no holder has; the next lease gets a greater one.
    Free { generation: u64 },
    /// Its holder renews it.
    Renewed { holder: Holder, left_ms: u64 },
}

/// What an agent's report of a generation means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reported {
    /// It is not newer than the store's.
    Known,
    /// The record to write.
    Raised(Record),
    /// It is too far above the store's.
    OutOfBounds,
}

/// Why a generation does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fenced {
    /// Another holder took the lease since.
    Older,
    /// No holder ever had this generation.
    NeverGiven,
    /// Its holder released the lease.
    Released,
}

impl Record {
    /// Does the lease hold this generation? An expired lease that no other holder took still does.
    pub fn fences(record: Option<&Record>, generation: u64) -> Option<Fenced> {
        let last = record.map_or(0, Record::last);
        match (record, generation) {
            (_, 0) => Some(Fenced::NeverGiven),
            (Some(record), _) if generation == last && record.holder.is_some() => None,
            _ if generation == last => Some(Fenced::Released),
            _ if generation < last => Some(Fenced::Older),
            _ => Some(Fenced::NeverGiven),
        }
    }

    /// The last generation that was given out. A forged one counts as none.
    fn last(&self) -> u64 {
        if self.generation > MAX_GENERATION { 0 } else { self.generation }
    }

    fn next(&self) -> u64 {
        let floor = if self.floor > MAX_GENERATION { 0 } else { self.floor };
        self.last().max(floor).saturating_add(1)
    }

    /// An agent knows this generation: the next one is above it. The present holder keeps its own, so that one agent
    /// cannot end the work on all other hosts.
    pub fn reported(self, generation: u64) -> Reported {
        let known = self.next() - 1;
        match generation {
            _ if generation <= known => Reported::Known,
            _ if generation > known.saturating_add(MAX_STEP).min(MAX_RESET) => Reported::OutOfBounds,
            _ => Reported::Raised(Record { floor: generation, ..self }),
        }
    }

    /// Frees a lease that its holder does not renew, or any with `force`. The next generation is above all that were given
    /// out, above what agents reported, and above `above`.
    pub fn reset(current: Option<Record>, above: u64, force: bool, now: i64) -> Result<Record, Box<Record>> {
        let record = current.unwrap_or_default();
        if !force && record.is_renewed(now) {
            return Err(Box::new(record));
        }
        let generation = record.next().max(above.min(MAX_RESET).saturating_add(1));
        Ok(Record { generation, holder: None, expires: 0, floor: 0 })
    }

    /// A live holder's lease never ends later than [`MAX_TTL`] from now: one that does is stuck.
    fn is_renewed(&self, now: i64) -> bool {
        let left = self.expires.saturating_sub(now);
        let alive = self.holder.as_ref().is_some_and(|holder| !holder.is_dead());
        alive && left > 0 && left <= ms(MAX_TTL)
    }

    /// When a lease that is taken or renewed now ends.
    pub fn ends(now: i64, lives: Duration) -> i64 {
        now.saturating_add(ms(lives.min(MAX_TTL)))
    }

    /// May this holder have it now? With the record as it is then.
    pub fn taken_by(
        current: Option<Record>,
        holder: &Holder,
        lives: Duration,
        now: i64,
    ) -> Result<Record, Box<Record>> {
        let record = current.unwrap_or_default();
        let expires = Record::ends(now, lives);
        match &record.holder {
            // Asking again is renewing.
            Some(other)
                if other.is(holder) && record.expires > now && record.generation <= MAX_GENERATION =>
            {
                Ok(Record { expires, holder: Some(holder.clone()), ..record })
            }
            Some(other) if record.expires > now && !other.is_dead() => Err(Box::new(record)),
            Some(_) | None => {
                let generation = record.next();
                Ok(Record { generation, holder: Some(holder.clone()), expires, floor: 0 })
            }
        }
    }
}

fn ms(time: Duration) -> i64 {
    i64::try_from(time.as_millis()).unwrap_or(i64::MAX)
}

pub(super) fn now_ms() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

fn host_name() -> String {
    read("/proc/sys/kernel/hostname")
}

fn boot_id() -> String {
    read("/proc/sys/kernel/random/boot_id")
}

/// The number itself is nobody's business.
fn machine() -> String {
    match read("/etc/machine-id") {
        number if number.is_empty() => number,
        number => blake3::hash(format!("abide lease {number}").as_bytes()).to_hex()[..16].to_owned(),
    }
}

/// The kernel's number for our space of pids.
fn pids() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map(|space| space.ino()).unwrap_or(0)
}

fn read(file: &str) -> String {
    std::fs::read_to_string(file).map(|text| text.trim().to_owned()).unwrap_or_default()
}

/// The 22nd field of /proc/PID/stat; the second, a name in parentheses, may contain anything.
fn started(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(") ")?;
    // A zombie is dead.
    let mut fields = rest.split(' ');
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIVE: Duration = Duration::from_secs(5);

    fn holder(id: &str, pid: u32, started: u64) -> Holder {
        Holder { pid, started, ..Holder::this(id) }
    }

    #[test]
    fn a_lease_goes_to_one_and_its_number_only_grows() {
        let me = Holder::this("me");
        // Alive, and not us: the first process of the machine.
        let other = holder("other", 1, started(1).expect("there is a first process"));
        let first = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert_eq!((first.generation, first.expires), (1, 6000));
        assert_eq!(Record::taken_by(Some(first.clone()), &other, FIVE, 2000), Err(Box::new(first.clone())));
        let renewed = Record::taken_by(Some(first.clone()), &me, FIVE, 3000).expect("ours");
        assert_eq!((renewed.generation, renewed.expires), (1, 8000));
        let after = Record::taken_by(Some(renewed), &other, FIVE, 8000).expect("it expired");
        assert_eq!(after.generation, 2);
        let free = Record { holder: None, ..after };
        assert_eq!(Record::taken_by(Some(free), &me, FIVE, 9000).expect("released").generation, 3);
    }

    #[test]
    fn a_holder_that_is_provably_dead_is_replaced_at_once() {
        let me = Holder::this("me");
        for dead in [
            holder("gone", me.pid, me.started + 1),
            Holder { boot_id: "another boot".into(), ..holder("gone", 1, 0) },
            holder("gone", u32::MAX, 1),
        ] {
            assert!(dead.is_dead());
            let record = Record { generation: 7, holder: Some(dead), expires: i64::MAX, floor: 0 };
            assert_eq!(Record::taken_by(Some(record), &me, FIVE, 0).expect("dead").generation, 8);
        }
        assert!(!me.is_dead());
        // Of another machine nothing is certain, whatever it is called; nor of a container beside this one.
        let gone = holder("gone", u32::MAX, 1);
        for other in [
            Holder { host: "elsewhere".into(), ..gone.clone() },
            Holder { boot_id: "another boot".into(), machine: "another".into(), ..gone.clone() },
            Holder { boot_id: "another boot".into(), machine: String::new(), ..gone.clone() },
            Holder { pids: gone.pids + 1, ..gone.clone() },
        ] {
            assert!(!other.is_dead(), "{other:?}");
        }
        // As it was said before there was a word for that.
        let old = r#"{"id":"a","host":"h","boot_id":"b","pid":1,"started":1}"#;
        assert!(!serde_json::from_str::<Holder>(old).expect("it is read").is_dead());
    }

    #[test]
    fn one_that_has_the_same_name_is_not_the_same() {
        let me = Holder::this("watch-1");
        let held = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert!(Record::taken_by(Some(held.clone()), &me, FIVE, 2000).is_ok());
        for other in [
            Holder { host: "elsewhere".into(), ..me.clone() },
            Holder { boot_id: "another".into(), ..me.clone() },
            Holder { pid: me.pid + 1, ..me.clone() },
            Holder { started: me.started + 1, ..me.clone() },
            Holder { pids: me.pids + 1, ..me.clone() },
        ] {
            assert_eq!(
                Record::taken_by(Some(held.clone()), &other, FIVE, 2000),
                Err(Box::new(held.clone())),
                "{other:?}"
            );
        }
    }

    #[test]
    fn a_generation_counts_while_the_lease_holds_it() {
        let (me, other) = (Holder::this("me"), Holder::this("other"));
        let fences = |record: &Record, generation| Record::fences(Some(record), generation);
        assert_eq!(Record::fences(None, 1), Some(Fenced::NeverGiven));
        let held = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert_eq!(fences(&held, 1), None);
        for forged in [0, 2, MAX_GENERATION, u64::MAX] {
            assert_eq!(fences(&held, forged), Some(Fenced::NeverGiven), "{forged}");
        }
        // Expired, and no other holder took it: as before.
        let next = Record::taken_by(Some(held.clone()), &other, FIVE, 6000).expect("expired");
        assert_eq!((fences(&next, 1), fences(&next, 2)), (Some(Fenced::Older), None));
        let released = Record { holder: None, ..next };
        assert_eq!(fences(&released, 2), Some(Fenced::Released));
        // An earlier version took any number from a request.
        let forged = Record { generation: u64::MAX, ..released };
        assert_eq!(fences(&forged, u64::MAX), Some(Fenced::NeverGiven));
        assert_eq!(Record::taken_by(Some(forged), &me, FIVE, 9000).expect("free").generation, 1);
    }

    #[test]
    fn a_report_raises_the_next_generation_within_bounds() {
        let (me, other) = (Holder::this("me"), Holder::this("other"));
        let held = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert_eq!(held.clone().reported(1), Reported::Known);
        for forged in [MAX_STEP + 2, MAX_RESET, MAX_GENERATION, u64::MAX] {
            assert_eq!(held.clone().reported(forged), Reported::OutOfBounds, "{forged}");
        }
        let Reported::Raised(raised) = held.reported(100) else { panic!("not raised") };
        assert_eq!(Record::fences(Some(&raised), 1), None, "the holder goes on");
        let renewed = Record::taken_by(Some(raised), &me, FIVE, 2000).expect("ours");
        assert_eq!((renewed.generation, renewed.floor), (1, 100));
        let next = Record::taken_by(Some(renewed), &other, FIVE, 9000).expect("expired");
        assert_eq!((next.generation, next.floor), (101, 0));
    }

    #[test]
    fn a_reset_frees_a_lease_and_never_gives_a_generation_twice() {
        let me = Holder::this("me");
        let held = Record::taken_by(None, &me, FIVE, 1000).expect("free");
        assert_eq!(Record::reset(Some(held.clone()), 0, false, 2000), Err(Box::new(held.clone())));
        let forced = Record::reset(Some(held.clone()), 0, true, 2000).expect("forced");
        assert_eq!((forced.generation, forced.holder.clone()), (2, None));
        assert_eq!(Record::fences(Some(&forced), 1), Some(Fenced::Older));
        // No live holder's lease ends in years: this one is stuck.
        let stuck = Record { expires: i64::MAX, floor: 40, ..held };
        assert_eq!(Record::reset(Some(stuck.clone()), 0, false, 2000).expect("stuck").generation, 41);
        let above = Record::reset(Some(stuck), 500, false, 2000).expect("stuck");
        assert_eq!(Record::taken_by(Some(above), &me, FIVE, 3000).expect("free").generation, 502);
        assert_eq!(Record::ends(0, Duration::from_secs(1 << 40)), 60_000);
    }
}
