//! Health of a running process: probes and the state that follows from their results.
//!
//! A process is Starting until its first successful probe or the end of its start period. After that, a number of failures
//! in a row makes it Degraded, and one success makes it Healthy again. The state is a pure function of the results.

use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

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

/// How a spec is probed, with the agent's defaults.
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
            interval: Some(seconds(interval, HealthCheck::INTERVAL)),
            timeout: seconds(timeout, HealthCheck::TIMEOUT),
            retries: retries.unwrap_or(HealthCheck::RETRIES),
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

/// Connects to `HOST:PORT`.
pub async fn probe_tcp(address: &str, timeout: Duration) -> ProbeResult {
    match tokio::time::timeout(timeout, TcpStream::connect(address)).await {
        Ok(Ok(_)) => Ok(format!("{address} accepts connections")),
        Ok(Err(error)) => Err(HealthFailure::new(format!("cannot connect to {address}: {error}"))),
        Err(_) => Err(HealthFailure::new(format!(
            "cannot connect to {address}: timed out after {} s",
            timeout.as_secs()
        ))),
    }
}

/// Requests a URL. Redirects are not followed; they count as success.
pub async fn probe_http(url: &str, timeout: Duration) -> ProbeResult {
    let Some(rest) = url.strip_prefix("http://") else {
        return Err(HealthFailure::new(format!("{url} is not an http:// URL")));
    };
    let (authority, path) = rest.find(['/', '?']).map_or((rest, ""), |at| rest.split_at(at));
    let address = match authority.rsplit_once(':') {
        Some((_, port)) if !port.ends_with(']') => authority.to_owned(),
        _ => format!("{authority}:80"),
    };
    let path = if path.starts_with('/') { path.to_owned() } else { format!("/{path}") };
    let path = path.split('#').next().unwrap_or_default();
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: {authority}\r\nUser-Agent: abide\r\nAccept: */*\r\nConnection: close\r\n\r\n"
    );
    let exchange = async {
        let mut stream = TcpStream::connect(&address).await?;
        stream.write_all(request.as_bytes()).await?;
        let mut response = Vec::new();
        // A response that breaks off after its status line still has a status.
        let read = stream.take(RESPONSE_BYTES as u64).read_to_end(&mut response).await;
        if response.is_empty() {
            read?;
        }
        std::io::Result::Ok(response)
    };
    match tokio::time::timeout(timeout, exchange).await {
        Ok(Ok(response)) => judge_response(url, &response),
        Ok(Err(error)) => Err(HealthFailure::new(format!("cannot request {url}: {error}"))),
        Err(_) => {
            Err(HealthFailure::new(format!("cannot request {url}: timed out after {} s", timeout.as_secs())))
        }
    }
}

fn judge_response(url: &str, response: &[u8]) -> ProbeResult {
    let text = String::from_utf8_lossy(response);
    let status = text
        .strip_prefix("HTTP/1.")
        .and_then(|rest| rest.get(2..5))
        .and_then(|digits| digits.parse::<u16>().ok());
    let Some(status) = status else {
        return Err(HealthFailure::new(format!("{url} did not answer with HTTP")));
    };
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body).trim();
    let shown: String = body.chars().take(SHOWN_CHARS).collect();
    let shown = if shown.is_empty() { format!("HTTP {status}") } else { format!("HTTP {status}: {shown}") };
    if (200..400).contains(&status) { Ok(shown) } else { Err(HealthFailure::new(shown)) }
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
        let second = Duration::from_secs(5);
        assert!(probe_tcp(&address, second).await.is_ok());
        let serve = async {
            loop {
                let (mut stream, _) = listener.accept().await.expect("a connection");
                let mut request = [0; 1024];
                let read = stream.read(&mut request).await.unwrap_or(0);
                if read > 0 {
                    let ok = request.starts_with(b"GET /healthz?full HTTP/1.1\r\n");
                    let line = if ok { "HTTP/1.1 200 OK\r\n\r\nfine" } else { "HTTP/1.1 500 No\r\n\r\n" };
                    stream.write_all(line.as_bytes()).await.expect("an answer");
                }
            }
        };
        let probe = async {
            let url = format!("http://{address}/healthz?full");
            assert_eq!(probe_http(&url, second).await, Ok("HTTP 200: fine".to_owned()));
            assert_eq!(
                probe_http(&format!("http://{address}"), second).await,
                Err(HealthFailure::new("HTTP 500"))
            );
        };
        tokio::select! { () = serve => {}, () = probe => {} }
        // Port 1 is privileged, so no other test listens there.
        assert!(probe_tcp("127.0.0.1:1", second).await.is_err());
    }
}
