//! Enrollment: the credential of a session, the exchange of a join token, and the renewal of the certificate.
//!
//! The agent makes its key and stores it before the exchange (`agent-key.pem`). After a crash it repeats the exchange
//! with the same key, and gets the same certificate. `agent.pem` holds certificate and key. Both files name the join
//! token: a token with another id starts over with a new key.

use std::path::{Path, PathBuf};
use std::time::Duration;

use reqwest::Client;
use tokio::task::JoinHandle;
use tracing::{info, warn};

use super::channel::{GatewayClient, JoinConfig, SessionError, parse_response};
use crate::agent_protocol::{CertificateLife, EnrollmentRequest, IssuedCertificate};
use crate::error_chain::chain;
use crate::failpoint;
use crate::http::{ClientConfig, TransportError, redirect};
use crate::permissions::check_private;
use crate::pki::{AgentKey, JoinToken, write_private};

/// Start of the first line of both files, before the id of the join token.
const TOKEN_LINE: &str = "abide-join-token: ";
/// Timeout of an exchange.
const EXCHANGE_TIMEOUT: Duration = Duration::from_secs(30);
/// Share of the time until a renewal that is jitter: the agents of a fleet renew at different times.
const RENEWAL_JITTER: f64 = 0.1;

/// Client and token of a session. Without a token, the client has a certificate.
pub(super) struct SessionCredential {
    pub(super) client: Client,
    pub(super) token: Option<String>,
}

/// Selects the credential of a session. The token file decides: a static token is used as it is; with a join token, or
/// without a file, the agent uses its certificate. `plain`: a client without a certificate.
pub(super) async fn credential(
    config: &JoinConfig,
    plain: &Client,
) -> Result<SessionCredential, SessionError> {
    if config.calling.client_cert.is_some() {
        return Ok(SessionCredential { client: config.calling.client(&config.url)?, token: None });
    }
    let enrolled = EnrolledFile::read(&config.folder)?;
    let Some(text) = read_token(config, enrolled.is_some())? else { return certified(config) };
    let token = match text.parse::<JoinToken>() {
        Ok(token) => token,
        Err(_) if JoinToken::is_intended(&text) => {
            return Err(SessionError::InvalidJoinToken {
                file: config.token_file.clone().unwrap_or_default(),
            });
        }
        Err(_) => return Ok(SessionCredential { client: plain.clone(), token: Some(text) }),
    };
    if enrolled.as_ref().is_some_and(|file| file.token_id == token.id()) {
        return certified(config);
    }
    match exchange(config, plain, &token).await {
        Ok(()) => certified(config),
        Err(error @ SessionError::Refused { .. }) if enrolled.is_some() => {
            warn!(why = %chain(&error), "cannot use the join token: the agent keeps its certificate");
            certified(config)
        }
        Err(error) => Err(error),
    }
}

/// The content of the token file. `None`: there is no file, and the agent has a certificate.
fn read_token(config: &JoinConfig, is_enrolled: bool) -> Result<Option<String>, SessionError> {
    let Some(file) = &config.token_file else { return Ok(None) };
    match std::fs::read_to_string(file) {
        Ok(text) => {
            check_private(file)?;
            Ok(Some(text.trim().to_owned()))
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && is_enrolled => Ok(None),
        Err(source) => Err(SessionError::TokenFile { file: file.clone(), source }),
    }
}

/// A client with the agent's certificate.
fn certified(config: &JoinConfig) -> Result<SessionCredential, SessionError> {
    let client_cert = Some(enrolled_path(&config.folder));
    let calling = ClientConfig { client_cert, ..config.calling.clone() };
    Ok(SessionCredential { client: calling.client(&config.url)?, token: None })
}

/// Exchanges a join token for a certificate, and stores it.
async fn exchange(config: &JoinConfig, client: &Client, token: &JoinToken) -> Result<(), SessionError> {
    if !config.url.starts_with("https:") {
        return Err(SessionError::JoinNeedsTls);
    }
    let key = key_for(&config.folder, token.id())?;
    let request = EnrollmentRequest {
        agent: config.agent.clone(),
        hosts: config.hosts.clone(),
        csr: key.request(&config.agent)?,
    };
    let url = format!("{}/api/abide/v1/agents/join", config.url.trim_end_matches('/'));
    let request = client.post(url).bearer_auth(token.reveal()).json(&request).timeout(EXCHANGE_TIMEOUT);
    let response = request.send().await.map_err(TransportError::from)?;
    if let Some(why) = redirect(&response) {
        return Err(TransportError::from(why).into());
    }
    let status = response.status();
    let bytes = response.bytes().await.map_err(TransportError::from)?;
    let issued: IssuedCertificate = parse_response(status, &bytes)?;
    failpoint::point("join-exchange");
    let file = EnrolledFile { token_id: token.id().to_owned(), key: key.reveal() };
    file.write(&config.folder, &issued.certificate)?;
    info!(
        token = token.id(),
        life_secs = issued.life.remaining_secs,
        "join token exchanged for a certificate"
    );
    Ok(())
}

/// The stored key for a join token, else a new one. It is stored before the first exchange.
fn key_for(folder: &Path, token_id: &str) -> Result<AgentKey, SessionError> {
    let file = folder.join("agent-key.pem");
    let failed = |source| SessionError::KeyFile { file: file.clone(), source };
    match std::fs::read_to_string(&file) {
        Ok(text) if token_id_of(&text) == Some(token_id) => return Ok(AgentKey::parse(&text)?),
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(source) => return Err(failed(source)),
    }
    let key = AgentKey::generate()?;
    write_private(&file, &format!("{TOKEN_LINE}{token_id}\n{}", key.reveal())).map_err(failed)?;
    Ok(key)
}

fn token_id_of(text: &str) -> Option<&str> {
    text.lines().next()?.strip_prefix(TOKEN_LINE)
}

fn enrolled_path(folder: &Path) -> PathBuf {
    folder.join("agent.pem")
}

/// The stored identity of an enrolled agent.
struct EnrolledFile {
    token_id: String,
    /// The private key in PEM.
    key: String,
}

impl EnrolledFile {
    /// `None`: the agent has no certificate.
    fn read(folder: &Path) -> Result<Option<EnrolledFile>, SessionError> {
        let file = enrolled_path(folder);
        let text = match std::fs::read_to_string(&file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(source) => return Err(SessionError::KeyFile { file, source }),
        };
        check_private(&file)?;
        let token_id = token_id_of(&text).unwrap_or_default().to_owned();
        let key = text.find("-----BEGIN PRIVATE KEY").map(|at| text[at..].to_owned()).unwrap_or_default();
        Ok(Some(EnrolledFile { token_id, key }))
    }

    fn write(&self, folder: &Path, certificate: &str) -> Result<(), SessionError> {
        let file = enrolled_path(folder);
        let text = format!("{TOKEN_LINE}{}\n{}\n{}", self.token_id, certificate.trim_end(), self.key);
        write_private(&file, &text).map_err(|source| SessionError::KeyFile { file, source })
    }
}

/// The renewal of a session's certificate. Dropping it ends the attempts.
pub(super) struct Renewal(JoinHandle<()>);

impl Renewal {
    /// `life`: of the session's certificate; `None`: there is nothing to renew.
    pub(super) fn start(life: Option<CertificateLife>, gateway: GatewayClient, folder: PathBuf) -> Renewal {
        Renewal(tokio::spawn(async move {
            let Some(life) = life else { return std::future::pending().await };
            let due = Duration::from_secs(life.renewal_in_secs());
            tokio::time::sleep(due.mul_f64(1.0 - RENEWAL_JITTER * fastrand::f64())).await;
            let retry = Duration::from_secs((life.total_secs / 60).clamp(1, 3_600));
            while let Err(error) = renew(&gateway, &folder).await {
                warn!(why = %chain(&error), "cannot renew the certificate: trying again");
                tokio::time::sleep(retry.mul_f64(1.0 + RENEWAL_JITTER * fastrand::f64())).await;
            }
        }))
    }

    /// Resolves when a new certificate is stored.
    pub(super) async fn done(&mut self) -> Result<(), SessionError> {
        Ok((&mut self.0).await?)
    }
}

impl Drop for Renewal {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn renew(gateway: &GatewayClient, folder: &Path) -> Result<(), SessionError> {
    let issued: IssuedCertificate = gateway.call("renew", &[], &serde_json::json!({})).await?;
    if let Some(file) = EnrolledFile::read(folder)? {
        file.write(folder, &issued.certificate)?;
    }
    info!(life_secs = issued.life.remaining_secs, "certificate renewed");
    Ok(())
}
