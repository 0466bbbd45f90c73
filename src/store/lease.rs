//! Leases: who may act, and under which number. A number is never given twice, so whoever carries an older one can be
//! told to look again.

use std::os::unix::fs::MetadataExt;

use serde::{Deserialize, Serialize};

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
pub enum Taken {
    Ours(Lease),
    /// Somebody has it; `left_ms`: for that much longer, unless it is renewed.
    Theirs {
        holder: Holder,
        generation: u64,
        left_ms: u64,
    },
}

/// What is kept of a lease. A lease that nobody holds keeps its number.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub generation: u64,
    pub holder: Option<Holder>,
    /// Milliseconds since 1970.
    pub expires: i64,
}

impl Record {
    /// May this holder have it now? With the record as it is then.
    pub fn taken_by(
        current: Option<Record>,
        holder: &Holder,
        lives_ms: i64,
        now: i64,
    ) -> Result<Record, Box<Record>> {
        let expires = now.saturating_add(lives_ms);
        let next = |generation: u64| Record { generation, holder: Some(holder.clone()), expires };
        let Some(record) = current else { return Ok(next(1)) };
        match &record.holder {
            // Asking again is renewing.
            Some(other) if other.is(holder) && record.expires > now => Ok(next(record.generation)),
            Some(other) if record.expires > now && !other.is_dead() => Err(Box::new(record)),
            Some(_) | None => Ok(next(record.generation.saturating_add(1))),
        }
    }
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

    fn holder(id: &str, pid: u32, started: u64) -> Holder {
        Holder { pid, started, ..Holder::this(id) }
    }

    #[test]
    fn a_lease_goes_to_one_and_its_number_only_grows() {
        let me = Holder::this("me");
        // Alive, and not us: the first process of the machine.
        let other = holder("other", 1, started(1).expect("there is a first process"));
        let first = Record::taken_by(None, &me, 5000, 1000).expect("free");
        assert_eq!((first.generation, first.expires), (1, 6000));
        assert_eq!(Record::taken_by(Some(first.clone()), &other, 5000, 2000), Err(Box::new(first.clone())));
        let renewed = Record::taken_by(Some(first.clone()), &me, 5000, 3000).expect("ours");
        assert_eq!((renewed.generation, renewed.expires), (1, 8000));
        let after = Record::taken_by(Some(renewed), &other, 5000, 8000).expect("it expired");
        assert_eq!(after.generation, 2);
        let free = Record { holder: None, ..after };
        assert_eq!(Record::taken_by(Some(free), &me, 5000, 9000).expect("released").generation, 3);
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
            let record = Record { generation: 7, holder: Some(dead), expires: i64::MAX };
            assert_eq!(Record::taken_by(Some(record), &me, 5000, 0).expect("dead").generation, 8);
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
        let held = Record::taken_by(None, &me, 5000, 1000).expect("free");
        assert!(Record::taken_by(Some(held.clone()), &me, 5000, 2000).is_ok());
        for other in [
            Holder { host: "elsewhere".into(), ..me.clone() },
            Holder { boot_id: "another".into(), ..me.clone() },
            Holder { pid: me.pid + 1, ..me.clone() },
            Holder { started: me.started + 1, ..me.clone() },
            Holder { pids: me.pids + 1, ..me.clone() },
        ] {
            assert_eq!(
                Record::taken_by(Some(held.clone()), &other, 5000, 2000),
                Err(Box::new(held.clone())),
                "{other:?}"
            );
        }
    }
}
