//! Browser sessions: opened by a login, ended by logout, idle time, age, or the end of the credential that opened them.
//!
//! Sessions are in memory: a restart of the controller ends them. The table is keyed by digests of the ids, so that the
//! duration of a lookup reveals nothing about an id. Times come from the caller, which reads the clock once per request.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};

use crate::access::apps::SecretDigest;
use crate::ids::fresh_secret;
use crate::model::Time;

/// Time without an action of the person after which a session ends.
pub const IDLE_MS: i64 = 30 * 60_000;
/// Age at which a session ends.
pub const MAX_AGE_MS: i64 = 12 * 3_600_000;
/// Maximum sessions of one person, and of all. The one that was used least recently is ended for a new one.
const MAX_PER_PERSON: usize = 16;
const MAX_SESSIONS: usize = 1024;
/// A clock that was set back further than this ends a session: its age is unknown.
const CLOCK_TOLERANCE_MS: i64 = 60_000;

/// Digest of a session's id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SessionKey([u8; 32]);

/// A session of a person.
#[derive(Clone, PartialEq, Eq)]
pub struct Session {
    /// The person's code among all callers.
    pub code: String,
    /// The token that opened it. `None`: a trusted proxy authenticated the person.
    pub secret: Option<SecretDigest>,
    /// Sent with each change. A page of another site cannot read it.
    pub csrf: String,
    opened: Time,
    used: Time,
}

/// The id of a new session, for the cookie, and its key.
pub struct NewSession {
    pub id: String,
    pub key: SessionKey,
}

#[derive(Default)]
pub struct Sessions(Mutex<HashMap<SessionKey, Session>>);

impl Session {
    fn is_open(&self, now: Time) -> bool {
        now.0 < self.opened.0.saturating_add(MAX_AGE_MS)
            && now.0 < self.used.0.saturating_add(IDLE_MS)
            && now.0.saturating_add(CLOCK_TOLERANCE_MS) >= self.used.0
    }

    /// The time at which it ends at the latest.
    pub fn ends(&self) -> Time {
        Time(self.opened.0.saturating_add(MAX_AGE_MS))
    }
}

impl SessionKey {
    pub fn of_id(id: &str) -> SessionKey {
        SessionKey(Sha256::digest(id.as_bytes()).into())
    }
}

impl Sessions {
    pub fn open(&self, code: &str, secret: Option<SecretDigest>, now: Time) -> NewSession {
        let (id, csrf) = (fresh_secret(), fresh_secret());
        let key = SessionKey::of_id(&id);
        let mut table = self.table();
        table.retain(|_, session| session.is_open(now));
        while table.values().filter(|session| session.code == code).count() >= MAX_PER_PERSON {
            evict(&mut table, |session| session.code == code);
        }
        while table.len() >= MAX_SESSIONS {
            evict(&mut table, |_| true);
        }
        let session = Session { code: code.to_owned(), secret, csrf, opened: now, used: now };
        table.insert(key, session);
        NewSession { id, key }
    }

    /// An open session. `is_action`: the request counts as an action of the person.
    pub fn find(&self, key: SessionKey, now: Time, is_action: bool) -> Option<Session> {
        let mut table = self.table();
        let session = table.get_mut(&key)?;
        if !session.is_open(now) {
            table.remove(&key);
            return None;
        }
        if is_action {
            session.used = now;
        }
        Some(session.clone())
    }

    pub fn is_open(&self, key: SessionKey, now: Time) -> bool {
        self.find(key, now, false).is_some()
    }

    pub fn close(&self, key: SessionKey) {
        self.table().remove(&key);
    }

    /// Ends the other sessions.
    pub fn retain(&self, is_valid: impl Fn(&Session) -> bool) {
        self.table().retain(|_, session| is_valid(session));
    }

    fn table(&self) -> MutexGuard<'_, HashMap<SessionKey, Session>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Removes the session that was used least recently.
fn evict(table: &mut HashMap<SessionKey, Session>, is_meant: impl Fn(&Session) -> bool) {
    let meant = table.iter().filter(|(_, session)| is_meant(session));
    if let Some(key) = meant.min_by_key(|(_, session)| session.used).map(|(key, _)| *key) {
        table.remove(&key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1000;

    #[test]
    fn a_session_ends_when_it_is_idle_or_old() {
        let sessions = Sessions::default();
        let one = sessions.open("person:ann", None, Time(0));
        let csrf = sessions.find(one.key, Time(0), true).expect("open").csrf;
        assert!(csrf != one.id && csrf.len() == 48 && one.id.len() == 48);
        assert_eq!(SessionKey::of_id(&one.id), one.key);
        let mut now = 0;
        while now + IDLE_MS - SECOND < MAX_AGE_MS {
            now += IDLE_MS - SECOND;
            assert!(sessions.find(one.key, Time(now), true).is_some(), "{now}");
        }
        assert!(sessions.find(one.key, Time(MAX_AGE_MS), true).is_none(), "too old");
        let two = sessions.open("person:ann", None, Time(0));
        assert!(sessions.find(two.key, Time(IDLE_MS - 1), false).is_some(), "no action");
        assert!(!sessions.is_open(two.key, Time(IDLE_MS)), "idle");
        assert!(!sessions.is_open(two.key, Time(1)), "an ended session does not come back");
    }

    #[test]
    fn a_clock_that_is_set_back_ends_a_session() {
        let sessions = Sessions::default();
        let one = sessions.open("person:ann", None, Time(MAX_AGE_MS));
        assert!(sessions.is_open(one.key, Time(MAX_AGE_MS - CLOCK_TOLERANCE_MS)));
        assert!(!sessions.is_open(one.key, Time(MAX_AGE_MS - CLOCK_TOLERANCE_MS - 1)));
    }

    #[test]
    fn sessions_are_bounded_per_person_and_in_total() {
        let sessions = Sessions::default();
        let all: Vec<NewSession> =
            (0..=MAX_PER_PERSON).map(|nth| sessions.open("person:ann", None, Time(nth as i64))).collect();
        let now = Time(SECOND);
        assert!(!sessions.is_open(all[0].key, now), "the one that was used least recently");
        assert!(all[1..].iter().all(|one| sessions.is_open(one.key, now)));
        let other = sessions.open("person:bob", None, now);
        assert!(sessions.is_open(other.key, now) && sessions.is_open(all[1].key, now), "bob has his own");
        for nth in 0..2 * MAX_SESSIONS {
            sessions.open(&format!("person:{nth}"), None, now);
        }
        assert_eq!(sessions.table().len(), MAX_SESSIONS);
        sessions.table().clear();
        sessions.open("person:ann", None, Time(0));
        sessions.open("person:ann", None, Time(IDLE_MS));
        assert_eq!(sessions.table().len(), 1, "ended sessions are removed");
    }
}
