//! Health of a running process: probes and the state that follows from their results.
//!
//! A process is Starting until its first successful probe or the end of its start period. After that, a number of failures
//! in a row makes it Degraded, and one success makes it Healthy again. The state is a pure function of the results.

use std::io::ErrorKind;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::masking::SecretTexts;
use super::name_lookup::resolve;
use super::policy::HostPolicy;
use crate::error_chain::chain;
use crate::model::{Health, HealthCheck, Monitor, Spec, SpecSection};

/// The output of a successful probe, or the reason of a failure.
pub type ProbeResult = Result<String, HealthFailure>;

/// The message of a failed health check.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct HealthFailure(String);

impl HealthFailure {
    pub fn of(error: &(dyn std::error::Error + 'static)) -> HealthFailure {
        HealthFailure(chain(error))
    }

    fn new(message: impl Into<String>) -> HealthFailure {
        HealthFailure(message.into())
    }
}

/// Interval of probes until the first success, so that a process is Healthy as soon as it is.
const STARTING_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes of a response that are read.
const RESPONSE_BYTES: usize = 4096;
/// Characters of a response that are shown.
const SHOWN_CHARS: usize = 200;

/// The probe of a spec.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe<'a> {
    Command(&'a str),
    Http(&'a str),
    Tcp(&'a str),
}

/// Probe of a spec, with the agent's defaults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthSettings<'a> {
    pub probe: Probe<'a>,
    pub start_period: Duration,
    /// `None`: the agent's check interval.
    pub interval: Option<Duration>,
    pub timeout: Duration,
    pub retries: u32,
}

impl HealthSettings<'_> {
    /// `None`: the spec has no health check.
    pub fn of(spec: &Spec) -> Option<HealthSettings<'_>> {
        let HealthCheck { cmd, http, tcp, start_period, interval, timeout, retries } = &spec.health;
        let seconds = |set: &Option<u32>, default: u32| Duration::from_secs(set.unwrap_or(default).into());
        let bounded = |set: &Option<u32>, default: u32| {
            let within = set.unwrap_or(default).clamp(1, HealthCheck::MAX_SECONDS);
            Duration::from_secs(within.into())
        };
        let start_check = spec.monitor.start_check_secs.unwrap_or(Monitor::START_CHECK_SECS);
        let start_period = seconds(start_period, HealthCheck::START_PERIOD.max(start_check));
        if !spec.health.is_set() {
            // GSE's health_cmd has no settings of its own: each failure counts.
            let probe = Probe::Command(spec.control.health_cmd.as_deref()?);
            let limit = spec.monitor.op_timeout.unwrap_or(Monitor::OP_TIMEOUT).min(HealthCheck::TIMEOUT);
            let timeout = Duration::from_secs(limit.into());
            return Some(HealthSettings { probe, start_period, interval: None, timeout, retries: 1 });
        }
        let probe = match (cmd, http, tcp) {
            (Some(command), _, _) => Probe::Command(command),
            (None, Some(url), _) => Probe::Http(url),
            (None, None, Some(address)) => Probe::Tcp(address),
            (None, None, None) => return None,
        };
        Some(HealthSettings {
            probe,
            start_period,
            // A spec of an earlier version may have values that a gateway refuses today.
            interval: Some(bounded(interval, HealthCheck::INTERVAL)),
            timeout: bounded(timeout, HealthCheck::TIMEOUT),
            retries: retries.unwrap_or(HealthCheck::RETRIES).clamp(1, HealthCheck::MAX_RETRIES),
        })
    }

    /// Wait before the next probe.
    pub fn next_interval(&self, state: &HealthState, check_interval: Duration) -> Duration {
        let interval = self.interval.unwrap_or(check_interval);
        match state.health {
            Health::Starting => interval.min(STARTING_INTERVAL),
            _ => interval,
        }
    }
}

/// The health of a running process.
#[derive(Clone, Debug, PartialEq)]
pub struct HealthState {
    pub health: Health,
    /// Failures in a row after the start period.
    failures: u32,
    /// The last probe.
    pub last: Option<ProbeResult>,
}

impl Default for HealthState {
    fn default() -> HealthState {
        HealthState { health: Health::Starting, failures: 0, last: None }
    }
}

impl HealthState {
    /// The state after a probe of a process that has run for `uptime`.
    pub fn after(&self, result: ProbeResult, uptime: Duration, settings: &HealthSettings<'_>) -> HealthState {
        let is_starting = self.health == Health::Starting && uptime < settings.start_period;
        let (health, failures) = match &result {
            Ok(_) => (Health::Healthy, 0),
            Err(_) if is_starting => (Health::Starting, 0),
            Err(_) if self.failures.saturating_add(1) >= settings.retries => {
                (Health::Degraded, self.failures.saturating_add(1))
            }
            Err(_) => (self.health, self.failures.saturating_add(1)),
        };
        HealthState { health, failures, last: Some(result) }
    }
}

/// The connections of a probe.
pub struct ProbeClient<'a> {
    /// The user of the spec, whose lookups are bounded.
    pub uid: u32,
    /// Bounds the addresses.
    pub policy: &'a HostPolicy,
    pub timeout: Duration,
}

impl ProbeClient<'_> {
    /// Connects to `HOST:PORT`.
    pub async fn connect(&self, address: &str) -> ProbeResult {
        match tokio::time::timeout(self.timeout, self.open(address)).await {
            Ok(Ok(_)) => Ok(format!("{address} accepts connections")),
            Ok(Err(error)) => Err(HealthFailure::new(format!("cannot connect to {address}: {error}"))),
            Err(_) => Err(HealthFailure::new(format!(
                "cannot connect to {address}: timed out after {} s",
                self.timeout.as_secs()
            ))),
        }
    }

    /// Connects to one of the addresses that were checked: a second lookup could give others.
    async fn open(&self, address: &str) -> std::io::Result<TcpStream> {
        let found = resolve(self.uid, address).await?;
        let allowed = self.policy.probe_addresses(address, found);
        let allowed = allowed.map_err(|refused| std::io::Error::new(ErrorKind::PermissionDenied, refused))?;
        TcpStream::connect(&*allowed).await
    }

    /// Requests a URL. Redirects are not followed; they count as success.
    pub async fn request(&self, url: &str) -> Result<HttpResponse, HealthFailure> {
        let Some(rest) = url.strip_prefix("http://") else {
            return Err(HealthFailure::new(format!("{url} is not an http:// URL")));
        };
        if HealthCheck::has_forbidden(rest) {
            return Err(HealthFailure::new("the URL contains a space or a control character"));
        }
        let (authority, path) = split_authority(rest);
        let address = with_port(authority);
        let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
        let path = path.split('#').next().unwrap_or_default();
        let request = format!(
            "GET {path} HTTP/1.1\r\nHost: {authority}\r\nUser-Agent: abide\r\nAccept: */*\r\nConnection: close\r\n\r\n"
        );
        let mut response = Vec::new();
        let exchange = async {
            let mut stream = self.open(&address).await?;
            stream.write_all(request.as_bytes()).await?;
            let mut rest = stream.take(RESPONSE_BYTES as u64);
            // A success needs no body: the server may keep the connection open, or send without end.
            while rest.read_buf(&mut response).await? > 0 && !is_success(&response) {}
            std::io::Result::Ok(())
        };
        let ended = tokio::time::timeout(self.timeout, exchange).await;
        match ended {
            // A response that breaks off, or does not end, after its status line still has a status.
            _ if status(&response).is_some() => parse_response(url, &response),
            Ok(Ok(())) => parse_response(url, &response),
            Ok(Err(error)) => Err(HealthFailure::new(format!("cannot request {url}: {error}"))),
            Err(_) => Err(HealthFailure::new(format!(
                "cannot request {url}: timed out after {} s",
                self.timeout.as_secs()
            ))),
        }
    }
}

/// The `HOST:PORT` of an http:// URL.
pub fn http_address(url: &str) -> Option<String> {
    Some(with_port(split_authority(url.strip_prefix("http://")?).0))
}

fn split_authority(rest: &str) -> (&str, &str) {
    rest.find(['/', '?']).map_or((rest, ""), |at| rest.split_at(at))
}

fn with_port(authority: &str) -> String {
    match authority.rsplit_once(':') {
        Some((_, port)) if !port.ends_with(']') => authority.to_owned(),
        _ => format!("{authority}:80"),
    }
}

/// The response to an HTTP probe: its status, and the begin of its body.
#[derive(Debug, PartialEq, Eq)]
pub struct HttpResponse {
    status: u16,
    body: Vec<u8>,
    /// The end of the body was not read.
    is_cut: bool,
}

/// The status of a response whose status line is complete.
fn status(response: &[u8]) -> Option<u16> {
    let line = response.split(|byte| *byte == b'\n').next().filter(|line| line.len() < response.len())?;
    let digits = line.strip_prefix(b"HTTP/1.")?.get(2..5)?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// Whether the headers of a successful response are complete.
fn is_success(response: &[u8]) -> bool {
    let has_headers = response.windows(4).any(|bytes| bytes == b"\r\n\r\n");
    has_headers && status(response).is_some_and(|status| (200..400).contains(&status))
}

fn parse_response(url: &str, response: &[u8]) -> Result<HttpResponse, HealthFailure> {
    let Some(status) = status(response) else {
        return Err(HealthFailure::new(format!("{url} did not answer with HTTP")));
    };
    let begin = response.windows(4).position(|bytes| bytes == b"\r\n\r\n").map(|at| at + 4);
    let body = begin.and_then(|at| response.get(at..)).unwrap_or_default().trim_ascii().to_vec();
    Ok(HttpResponse { status, body, is_cut: response.len() >= RESPONSE_BYTES })
}

impl HttpResponse {
    pub fn has_body(&self) -> bool {
        !self.body.is_empty()
    }

    /// The result of the probe. The begin of the body is shown with the process's secrets masked; `None`: they cannot
    /// be read, and the body is not shown.
    pub fn result(&self, secrets: Option<&SecretTexts>) -> ProbeResult {
        let status = self.status;
        let body = secrets.map(|secrets| {
            let masked = secrets.mask(&self.body, 0);
            // The begin of a secret at the cut is not recognized.
            let unknown = if self.is_cut { secrets.longest() } else { 0 };
            let end = masked.floor_char_boundary(masked.len().saturating_sub(unknown));
            masked[..end].chars().take(SHOWN_CHARS).collect::<String>()
        });
        let shown = match body.filter(|body| !body.is_empty()) {
            Some(body) => format!("HTTP {status}: {body}"),
            None => format!("HTTP {status}"),
        };
        if (200..400).contains(&status) { Ok(shown) } else { Err(HealthFailure::new(shown)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(health: HealthCheck) -> Spec {
        Spec { health, ..Spec::default() }
    }

    fn failed() -> ProbeResult {
        Err(HealthFailure::new("no"))
    }

    #[test]
    fn a_process_is_starting_until_its_first_success_or_the_end_of_its_start_period() {
        let spec = spec(HealthCheck { tcp: Some("h:1".to_owned()), ..HealthCheck::default() });
        let settings = HealthSettings::of(&spec).expect("a check");
        assert_eq!((settings.start_period, settings.retries), (Duration::from_secs(30), 3));
        let at = Duration::from_secs;
        let mut state = HealthState::default();
        for second in 0..30 {
            state = state.after(failed(), at(second), &settings);
            assert_eq!(state.health, Health::Starting, "{second}");
        }
        state = state.after(failed(), at(30), &settings).after(failed(), at(40), &settings);
        assert_eq!(state.health, Health::Starting, "two failures of three");
        state = state.after(failed(), at(50), &settings);
        assert_eq!(state.health, Health::Degraded);
        state = state.after(Ok(String::new()), at(60), &settings);
        assert_eq!(state.health, Health::Healthy);
        state = state.after(failed(), at(70), &settings).after(Ok(String::new()), at(80), &settings);
        state = state.after(failed(), at(90), &settings).after(failed(), at(100), &settings);
        assert_eq!(state.health, Health::Healthy, "only failures in a row count");
        assert_eq!(state.after(failed(), at(110), &settings).health, Health::Degraded);
    }

    #[test]
    fn a_failure_of_health_cmd_counts_after_the_first_success() {
        let mut spec = Spec::default();
        spec.control.health_cmd = Some("check".to_owned());
        spec.monitor.start_check_secs = Some(40);
        let settings = HealthSettings::of(&spec).expect("a check");
        assert_eq!((settings.start_period, settings.retries), (Duration::from_secs(40), 1));
        let starting = HealthState::default().after(failed(), Duration::from_secs(39), &settings);
        assert_eq!(starting.health, Health::Starting);
        let healthy = starting.after(Ok(String::new()), Duration::from_secs(39), &settings);
        assert_eq!(healthy.after(failed(), Duration::from_secs(39), &settings).health, Health::Degraded);
        assert_eq!(HealthSettings::of(&Spec::default()), None);
    }

    fn judge_response(url: &str, response: &[u8]) -> ProbeResult {
        parse_response(url, response)?.result(Some(&SecretTexts::default()))
    }

    #[test]
    fn values_of_earlier_versions_are_bounded() {
        let check = HealthCheck {
            tcp: Some("h:1".to_owned()),
            interval: Some(0),
            timeout: Some(0),
            retries: Some(0),
            ..HealthCheck::default()
        };
        assert_eq!(check.check().map_err(|problem| problem.field), Err("health.interval".to_owned()));
        let spec = spec(check);
        let settings = HealthSettings::of(&spec).expect("a check");
        let second = Duration::from_secs(1);
        assert_eq!((settings.interval, settings.timeout, settings.retries), (Some(second), second, 1));
    }

    #[test]
    fn secrets_of_a_response_are_masked() {
        let mut secrets = SecretTexts::default();
        secrets.add("hunter2hunter2");
        let response = |body: &str| {
            let text = format!("HTTP/1.1 503 No\r\n\r\n{body}");
            let bytes = text.as_bytes();
            parse_response("u", &bytes[..bytes.len().min(RESPONSE_BYTES)]).expect("a response")
        };
        let shown = |body: &str| response(body).result(Some(&secrets)).map_err(|failure| failure.0);
        assert_eq!(shown("no login: hunter2hunter2"), Err("HTTP 503: no login: (secret)".to_owned()));
        let across = format!("{}hunter2hunter2", "x".repeat(SHOWN_CHARS - 5));
        assert!(!shown(&across).expect_err("a failure").contains("hunt"), "a secret across the shown end");
        let cut = format!("{}\r\n\r\nhunter2hunter2", " ".repeat(RESPONSE_BYTES - 30));
        assert!(!shown(&cut).expect_err("a failure").contains("hunt"), "a secret across the end of the read");
        assert_eq!(response("x").result(None), Err(HealthFailure::new("HTTP 503")));
    }

    #[test]
    fn a_response_is_judged_by_its_status() {
        assert_eq!(judge_response("u", b"HTTP/1.1 204 No Content\r\n\r\n"), Ok("HTTP 204".to_owned()));
        assert_eq!(judge_response("u", b"HTTP/1.0 302 Found\r\nA: b\r\n\r\nx"), Ok("HTTP 302: x".to_owned()));
        assert_eq!(
            judge_response("u", b"HTTP/1.1 503 No\r\n\r\ndatabase is down\n"),
            Err(HealthFailure::new("HTTP 503: database is down"))
        );
        for garbage in [&b""[..], b"SSH-2.0-x", b"HTTP/1.1", b"HTTP/1.1 abc"] {
            assert!(judge_response("u", garbage).is_err());
        }
    }

    #[tokio::test]
    async fn probes_reach_real_listeners() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let policy = HostPolicy::default();
        let client = ProbeClient { uid: 0, policy: &policy, timeout: Duration::from_secs(1) };
        assert!(client.connect(&address).await.is_ok());
        let serve = async {
            let mut open = Vec::new();
            loop {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                let mut request = [0; 1024];
                let read = stream.read(&mut request).await.unwrap_or(0);
                if read > 0 {
                    let ok = request.starts_with(b"GET /healthz?full HTTP/1.1\r\n");
                    let line = if ok { "HTTP/1.1 200 OK\r\n\r\nfine" } else { "HTTP/1.1 500 No\r\n\r\n" };
                    stream.write_all(line.as_bytes()).await.expect("an answer");
                    // The connection stays open.
                    open.push(stream);
                }
            }
        };
        let probe = async {
            let url = format!("http://{address}/healthz?full");
            let none = SecretTexts::default();
            let fine = client.request(&url).await.expect("a response");
            assert_eq!(fine.result(Some(&none)), Ok("HTTP 200: fine".to_owned()));
            let other = client.request(&format!("http://{address}")).await.expect("a response");
            assert_eq!(other.result(Some(&none)), Err(HealthFailure::new("HTTP 500")));
            let injected = format!("http://{address}/ HTTP/1.1\r\nX-Injected: 1\r\n");
            assert!(client.request(&injected).await.is_err());
        };
        tokio::select! { () = serve => {}, () = probe => {} }
        // Port 1 is privileged, so no other test listens there.
        assert!(client.connect("127.0.0.1:1").await.is_err());
    }
}
