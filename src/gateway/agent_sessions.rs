//! Agent sessions: at most one session per host.
//!
//! A session lives while its agent sends messages. Its stream may break and be reopened; while it is open, no other
//! agent can join for its hosts. An agent that joins again under its name replaces its own session.
//!
//! A token of all hosts can open sessions for any host, so their number is bounded: a holder at one address opens
//! sessions while they have fewer hosts than are still free. Its sessions without a stream end for new ones.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;

use super::figures::SessionFigures;
use crate::agent_protocol::{Join, ToAgent};
use crate::clock::{self, BootInstant};
use crate::http::CredentialKey;
use crate::ids::fresh_id;
use crate::model::HostKey;

#[derive(Default)]
pub struct AgentSessions(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    sessions: HashMap<String, Session>,
    by_host: HashMap<HostKey, String>,
    /// Last contact of hosts without a session.
    last: HashMap<HostKey, Instant>,
    /// Weight of the sessions of each token of all hosts and peer, and their sum.
    weights: HashMap<CredentialKey, usize>,
    total_weight: usize,
    /// Bytes of the figures of all sessions.
    figure_bytes: Arc<AtomicUsize>,
}

struct Session {
    agent: String,
    hosts: Vec<HostKey>,
    credential: CredentialKey,
    version: String,
    last_contact: Instant,
    /// Time by which the agent's wall clock was ahead of the gateway's at the last measurement, in milliseconds.
    skew_ms: Option<i64>,
    abilities: AgentAbilities,
    figures: Arc<SessionFigures>,
    stream: Option<OpenStream>,
    streams: u64,
    commit_lock: CommitLock,
}

/// Parts of the protocol that the agent of a session supports.
struct AgentAbilities {
    /// Heartbeats with a floor.
    floors: bool,
    /// Reads of logs.
    logs: bool,
    /// Figure queries.
    figures: bool,
}

/// Held while a session's results are committed: a successor continues from its predecessor's last commit.
pub type CommitLock = Arc<tokio::sync::Mutex<()>>;

struct OpenStream {
    /// Number of the stream: a replaced stream must not close its successor.
    number: u64,
    to: mpsc::UnboundedSender<ToAgent>,
    opened: BootInstant,
}

/// Identity of one open stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentStreamId {
    session: String,
    number: u64,
}

/// A host with a session, as `get hosts` shows it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostSession {
    pub host: HostKey,
    /// Whether its stream is open.
    pub connected: bool,
    pub version: String,
    pub clock_skew_ms: Option<i64>,
    /// Last contact, in milliseconds since 1970.
    pub last_contact: i64,
}

/// Clock difference above which a warning is logged, in milliseconds.
const SKEW_MS: i64 = 2_000;

/// Maximum weight of all sessions that tokens of all hosts opened: their hosts, and one per session. A token at one
/// address gets at most half of it.
const MAX_SHARED_WEIGHT: usize = 400_000;
/// Age from which a session without a stream ends for a new one of its credential. An agent opens its stream at once.
const EVICTABLE_AGE: Duration = Duration::from_secs(5);
/// Maximum hosts without a session whose last contact is kept.
const MAX_LAST_CONTACTS: usize = 200_000;

/// Reason why a session is not opened.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinRefusal {
    #[error("host {0} already has a connected agent: stop that agent first")]
    HostInUse(HostKey),
    #[error("too many hosts in sessions with this token: try again, or give agents credentials of their own")]
    TooManyHosts,
}

impl AgentSessions {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Opens a session for all of these hosts or none. Also returns the commit locks of the sessions that it ends.
    pub fn join(
        &self,
        join: &Join,
        credential: CredentialKey,
        lost_after: Duration,
    ) -> Result<(String, Vec<CommitLock>), JoinRefusal> {
        let mut inner = self.inner();
        for host in &join.hosts {
            let Some(session) = inner.by_host.get(host).and_then(|id| inner.sessions.get(id)) else {
                continue;
            };
            if session.agent != join.agent
                && session.stream.is_some()
                && session.last_contact.elapsed() < lost_after
            {
                return Err(JoinRefusal::HostInUse(host.clone()));
            }
        }
        let mut locks = Vec::new();
        for host in &join.hosts {
            if let Some(old) = inner.by_host.remove(host) {
                locks.extend(inner.sessions.get(&old).map(|session| Arc::clone(&session.commit_lock)));
                inner.end(&old);
            }
        }
        inner.make_room(credential, join.hosts.len() + 1)?;
        let id = fresh_id();
        let mut session = Session {
            agent: join.agent.clone(),
            hosts: join.hosts.clone(),
            credential,
            version: join.version.clone(),
            last_contact: Instant::now(),
            skew_ms: None,
            abilities: AgentAbilities { floors: join.floors, logs: join.logs, figures: join.figures },
            figures: Arc::new(SessionFigures::new(&inner.figure_bytes)),
            stream: None,
            streams: 0,
            commit_lock: CommitLock::default(),
        };
        session.measure_skew(join.clock);
        inner.sessions.insert(id.clone(), session);
        for host in &join.hosts {
            inner.by_host.insert(host.clone(), id.clone());
        }
        Ok((id, locks))
    }

    /// Opens the session's stream and closes the previous one. `None`: the session no longer exists.
    pub fn open(&self, id: &str) -> Option<(AgentStreamReceiver, Vec<HostKey>)> {
        let mut inner = self.inner();
        let session = inner.sessions.get_mut(id)?;
        let (to, receive) = mpsc::unbounded_channel();
        session.streams += 1;
        let (number, opened, floors) = (session.streams, BootInstant::now(), session.abilities.floors);
        session.stream = Some(OpenStream { number, to, opened });
        session.last_contact = Instant::now();
        Some((AgentStreamReceiver { receive, number, opened, floors }, session.hosts.clone()))
    }

    /// Closes a stream, unless a newer one replaced it.
    pub fn close_stream(&self, id: &str, number: u64) {
        if let Some(session) = self.inner().sessions.get_mut(id)
            && session.stream.as_ref().is_some_and(|stream| stream.number == number)
        {
            session.stream = None;
        }
    }

    /// Measures the clock difference of a session's agent. `clock`: milliseconds since 1970.
    pub fn measure_skew(&self, id: &str, clock: Option<i64>) {
        if let Some(session) = self.inner().sessions.get_mut(id) {
            session.measure_skew(clock);
        }
    }

    /// Records contact with an agent. Returns its name and hosts; `None`: it must join again.
    pub fn touch(&self, id: &str) -> Option<(String, Vec<HostKey>)> {
        let mut inner = self.inner();
        let session = inner.sessions.get_mut(id)?;
        session.last_contact = Instant::now();
        Some((session.agent.clone(), session.hosts.clone()))
    }

    /// The commit lock of a session. `None`: its agent must join again.
    pub fn commit_lock(&self, id: &str) -> Option<CommitLock> {
        self.inner().sessions.get(id).map(|session| Arc::clone(&session.commit_lock))
    }

    /// Sends a message to a host's agent. `false`: no agent is connected.
    pub fn send(&self, host: &HostKey, mut message: ToAgent) -> bool {
        let inner = self.inner();
        let session = inner.by_host.get(host).and_then(|id| inner.sessions.get(id));
        let Some(stream) = session.and_then(|session| session.stream.as_ref()) else { return false };
        if let ToAgent::Op(request) = &mut message {
            request.sent_ms = stream.opened.elapsed_ms();
        }
        stream.to.send(message).is_ok()
    }

    /// The open stream of a host's agent, and whether the agent serves reads of logs. The value changes with every
    /// reconnection.
    pub fn log_stream(&self, host: &HostKey) -> Option<(AgentStreamId, bool)> {
        let inner = self.inner();
        let id = inner.by_host.get(host)?;
        let session = inner.sessions.get(id)?;
        let number = session.stream.as_ref()?.number;
        Some((AgentStreamId { session: id.clone(), number }, session.abilities.logs))
    }

    /// The version of a host's connected agent.
    pub fn agent_version(&self, host: &HostKey) -> Option<String> {
        let inner = self.inner();
        let session = inner.sessions.get(inner.by_host.get(host)?)?;
        session.stream.as_ref().map(|_| session.version.clone())
    }

    /// The figures of a session. `None`: the session no longer exists.
    pub fn figures(&self, id: &str) -> Option<Arc<SessionFigures>> {
        self.inner().sessions.get(id).map(|session| Arc::clone(&session.figures))
    }

    /// The figures that a host's connected agent sent.
    pub fn open_figures(&self, host: &HostKey) -> Option<Arc<SessionFigures>> {
        let inner = self.inner();
        let session = inner.sessions.get(inner.by_host.get(host)?)?;
        session.stream.as_ref().map(|_| Arc::clone(&session.figures))
    }

    /// Whether the host's connected agent answers figure queries.
    pub fn answers_queries(&self, host: &HostKey) -> bool {
        let inner = self.inner();
        let session = inner.by_host.get(host).and_then(|id| inner.sessions.get(id));
        session.is_some_and(|session| session.stream.is_some() && session.abilities.figures)
    }

    /// Time since the last contact with a host's agent, by the monotonic clock: a step of the wall clock expires no
    /// session. `None`: the agent never connected.
    pub fn silent_for(&self, host: &HostKey) -> Option<Duration> {
        let inner = self.inner();
        let session = inner.by_host.get(host).and_then(|id| inner.sessions.get(id));
        session
            .map(|session| session.last_contact)
            .or_else(|| inner.last.get(host).copied())
            .map(|at| at.elapsed())
    }

    /// Last contact with a host in milliseconds since 1970, for display.
    pub fn last_contact(&self, host: &HostKey) -> Option<i64> {
        let ago = i64::try_from(self.silent_for(host)?.as_millis()).unwrap_or(i64::MAX);
        Some(clock::now().0.saturating_sub(ago))
    }

    /// All hosts with a session, sorted by host.
    pub fn all(&self) -> Vec<HostSession> {
        let inner = self.inner();
        let of = |session: &Session| {
            let ago = i64::try_from(session.last_contact.elapsed().as_millis()).unwrap_or(0);
            let row = |host: &HostKey| HostSession {
                host: host.clone(),
                connected: session.stream.is_some(),
                version: session.version.clone(),
                clock_skew_ms: session.skew_ms,
                last_contact: clock::now().0.saturating_sub(ago),
            };
            session.hosts.iter().map(row).collect::<Vec<_>>()
        };
        let mut all: Vec<HostSession> = inner.sessions.values().flat_map(of).collect();
        all.sort();
        all
    }

    /// Ends sessions without contact for `lost_after`. Returns their hosts.
    pub fn expire(&self, lost_after: Duration) -> Vec<HostKey> {
        let mut inner = self.inner();
        let silent = |session: &Session| session.last_contact.elapsed() >= lost_after;
        let gone: Vec<String> =
            inner.sessions.iter().filter(|(_, session)| silent(session)).map(|(id, _)| id.clone()).collect();
        gone.iter().flat_map(|id| inner.end(id)).collect()
    }

    pub fn sessions(&self) -> usize {
        self.inner().sessions.values().filter(|session| session.stream.is_some()).count()
    }
}

impl Session {
    fn measure_skew(&mut self, clock: Option<i64>) {
        let Some(skew_ms) = clock.map(|clock| clock.saturating_sub(clock::now().0)) else { return };
        let warned = self.skew_ms.is_some_and(|before| before.saturating_abs() > SKEW_MS);
        if skew_ms.saturating_abs() > SKEW_MS && !warned {
            let hosts: Vec<String> = self.hosts.iter().map(HostKey::to_string).collect();
            tracing::warn!(agent = %self.agent, hosts = %hosts.join(","), skew_ms, "the agent's clock differs from the gateway's");
        }
        self.skew_ms = Some(skew_ms);
    }
}

impl Inner {
    /// Reserves the weight of a session with a token of all hosts. Other credentials are bounded by their own hosts.
    fn make_room(&mut self, credential: CredentialKey, weight: usize) -> Result<(), JoinRefusal> {
        if !credential.is_of_all_hosts() {
            return Ok(());
        }
        if !self.has_room(credential, weight) {
            let is_evictable = |session: &Session| {
                session.credential == credential
                    && session.stream.is_none()
                    && session.last_contact.elapsed() >= EVICTABLE_AGE
            };
            let sessions = self.sessions.iter().filter(|(_, session)| is_evictable(session));
            let evicted: Vec<String> = sessions.map(|(id, _)| id.clone()).collect();
            evicted.iter().for_each(|id| drop(self.end(id)));
        }
        if !self.has_room(credential, weight) {
            return Err(JoinRefusal::TooManyHosts);
        }
        *self.weights.entry(credential).or_default() += weight;
        self.total_weight += weight;
        Ok(())
    }

    fn has_room(&self, credential: CredentialKey, weight: usize) -> bool {
        let own = self.weights.get(&credential).copied().unwrap_or(0);
        let free = MAX_SHARED_WEIGHT.saturating_sub(self.total_weight);
        own + weight <= free.saturating_sub(weight)
    }

    fn release(&mut self, session: &Session) {
        let weight = session.hosts.len() + 1;
        if let Some(own) = self.weights.get_mut(&session.credential) {
            *own = own.saturating_sub(weight);
            self.total_weight = self.total_weight.saturating_sub(weight);
            if *own == 0 {
                self.weights.remove(&session.credential);
            }
        }
    }

    /// Forgets the older half of the last contacts when there are too many: a host's name is the choice of its agent.
    fn trim_last_contacts(&mut self) {
        if self.last.len() <= MAX_LAST_CONTACTS {
            return;
        }
        let mut times: Vec<Instant> = self.last.values().copied().collect();
        let middle = times.len() / 2;
        let (_, median, _) = times.select_nth_unstable(middle);
        let median = *median;
        self.last.retain(|_, at| *at > median);
    }

    fn end(&mut self, id: &str) -> Vec<HostKey> {
        let Some(session) = self.sessions.remove(id) else { return Vec::new() };
        self.release(&session);
        for host in &session.hosts {
            if self.by_host.get(host).is_some_and(|current| current == id) {
                self.by_host.remove(host);
            }
            // A session without a stream is not proof of an agent at work.
            if session.streams > 0 {
                self.last.insert(host.clone(), session.last_contact);
            }
        }
        self.trim_last_contacts();
        session.hosts
    }
}

/// The receiving end of an open stream.
pub struct AgentStreamReceiver {
    pub receive: mpsc::UnboundedReceiver<ToAgent>,
    pub number: u64,
    pub opened: BootInstant,
    /// The agent supports heartbeats with a floor.
    pub floors: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::CredentialScope;

    const LONG: Duration = Duration::from_secs(60);

    fn own() -> CredentialKey {
        CredentialKey::new(CredentialScope::OneHost, "own")
    }

    fn join(agent: &str, hosts: &[&str]) -> Join {
        let hosts = hosts.iter().map(|host| host.parse().expect("a host")).collect();
        let (agent, version) = (agent.into(), "1".into());
        let (logs, figures) = (false, false);
        Join { agent, hosts, version, clock: None, floors: false, last_seq: 0, logs, figures }
    }

    #[test]
    fn a_host_has_one_agent_at_a_time() {
        let hosts = AgentSessions::default();
        let (first, _) = hosts.join(&join("a", &["0:10.0.0.1", "0:10.0.0.2"]), own(), LONG).expect("free");
        let second = join("b", &["0:10.0.0.3", "0:10.0.0.2"]);
        // The first session has no stream yet.
        let (stream, _) = hosts.open(&first).expect("a session");
        assert_eq!(
            hosts.join(&second, own(), LONG).err(),
            Some(JoinRefusal::HostInUse("0:10.0.0.2".parse().expect("a host")))
        );
        assert!(hosts.agent_version(&"0:10.0.0.3".parse().expect("a host")).is_none(), "all or none");
        // The same agent replaces its session, and the old stream cannot close the new one.
        let (again, locks) =
            hosts.join(&join("a", &["0:10.0.0.1", "0:10.0.0.2"]), own(), LONG).expect("its own");
        assert_eq!(locks.len(), 1, "its predecessor's");
        assert!(hosts.touch(&first).is_none());
        hosts.open(&again).expect("a session");
        hosts.close_stream(&again, 7);
        assert!(hosts.agent_version(&"0:10.0.0.1".parse().expect("a host")).is_some());
        hosts.close_stream(&again, stream.number);
        assert!(hosts.agent_version(&"0:10.0.0.1".parse().expect("a host")).is_none());
        // A broken stream does not reserve the host.
        assert!(hosts.join(&second, own(), LONG).is_ok());
    }

    #[test]
    fn silence_ends_a_session() {
        let hosts = AgentSessions::default();
        let (id, _) = hosts.join(&join("a", &["0:10.0.0.1"]), own(), LONG).expect("free");
        hosts.open(&id).expect("a session");
        assert!(hosts.expire(LONG).is_empty());
        let host: HostKey = "0:10.0.0.1".parse().expect("a host");
        assert_eq!(hosts.expire(Duration::ZERO), std::slice::from_ref(&host));
        assert!(hosts.touch(&id).is_none() && hosts.last_contact(&host).is_some());
    }

    #[test]
    fn sessions_of_one_holder_of_a_token_of_all_hosts_are_bounded_and_leave_room_for_others() {
        let hosts = AgentSessions::default();
        let at = |last: u8| CredentialKey::of_all_hosts("token", [10, 0, 0, last].into());
        let many = |agent: &str, first: u64, count: u64| {
            let names =
                (first..first + count).map(|n| HostKey::Address { cloud: n, ip: [10, 0, 0, 1].into() });
            Join { hosts: names.collect(), ..join(agent, &[]) }
        };
        let (kept, _) = hosts.join(&many("a", 0, 99_999), at(1), LONG).expect("room");
        hosts.join(&many("b", 100_000, 99_999), at(1), LONG).expect("half of all");
        let more = many("c", 200_000, 1);
        assert_eq!(hosts.join(&more, at(1), LONG).err(), Some(JoinRefusal::TooManyHosts));
        // Another address, and other credentials, find room.
        hosts.join(&many("d", 300_000, 50_000), at(2), LONG).expect("room");
        hosts.join(&join("e", &["0:10.0.0.9"]), own(), LONG).expect("its own host");
        // Sessions without a stream end for a new one.
        hosts.open(&kept).expect("a session");
        for session in hosts.inner().sessions.values_mut() {
            session.last_contact = Instant::now().checked_sub(2 * EVICTABLE_AGE).expect("an earlier time");
        }
        hosts.join(&more, at(1), LONG).expect("room");
        assert!(hosts.touch(&kept).is_some(), "a session with a stream stays");
        assert_eq!(hosts.all().len(), 99_999 + 1 + 50_000 + 1);
        // An ended session returns its weight.
        hosts.expire(Duration::ZERO);
        let inner = hosts.inner();
        assert!(inner.weights.is_empty() && inner.total_weight == 0 && inner.last.len() == 99_999);
    }

    #[test]
    fn last_contacts_are_bounded() {
        let mut inner = Inner::default();
        let first = Instant::now();
        for nth in 0..=MAX_LAST_CONTACTS as u64 {
            let host = HostKey::Address { cloud: nth, ip: [10, 0, 0, 1].into() };
            inner.last.insert(host, first + Duration::from_millis(nth));
        }
        inner.trim_last_contacts();
        assert_eq!(inner.last.len(), MAX_LAST_CONTACTS / 2);
        assert!(inner.last.values().all(|at| *at > first + Duration::from_millis(1000)));
    }
}
