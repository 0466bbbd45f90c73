//! Routes of alerts in the config file: `notify`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;

use super::secret_from::{SecretFrom, TextOrSecret};
use crate::alerts::message::PLACEHOLDERS;
use crate::alerts::receiver::SignatureScheme;
use crate::alerts::tracker::RouteRules;
use crate::alerts::{AlertReceiver, AlertRoute, MessageTemplate};
use crate::cli::args::milliseconds;
use crate::cli::{Exit, Failure};
use crate::contract::{AlertKind, EventLevel};
use crate::error_chain::chain;
use crate::http::{AddressError, ClientConfig, WebhookClient};

/// Default timeout of one attempt.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a template file.
const MAX_TEMPLATE: u64 = 1 << 20;

/// A route as it is written. Exactly one of `webhook`, `command` and `alertmanager` is set.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteEntry {
    webhook: Option<EndpointEntry>,
    command: Option<Vec<String>>,
    alertmanager: Option<EndpointEntry>,
    #[serde(default)]
    namespaces: Vec<String>,
    /// The lowest severity.
    severity: Option<EventLevel>,
    #[serde(default)]
    alerts: BTreeSet<AlertKind>,
    recoveries: Option<bool>,
    wait: Option<String>,
    settle: Option<String>,
    interval: Option<String>,
    repeat: Option<String>,
    timeout: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct EndpointEntry {
    url: TextOrSecret,
    #[serde(default)]
    headers: BTreeMap<String, TextOrSecret>,
    ca_file: Option<PathBuf>,
    proxy: Option<String>,
    #[serde(default)]
    insecure: bool,
    /// File, relative to the config file.
    template: Option<PathBuf>,
    sign: Option<SignEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SignEntry {
    scheme: String,
    secret: SecretFrom,
}

impl RouteEntry {
    /// The route. `folder`: of the config file.
    pub fn route(&self, name: &str, folder: &Path) -> Result<AlertRoute, Failure> {
        let wrong = |why: String| Failure::new(Exit::Usage, format!("notify route {name:?}: {why}"));
        let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if name.is_empty() || name.len() > 100 || !name.chars().all(is_plain) {
            return Err(wrong("a name has only letters, digits, `-`, `_` and `.`".to_owned()));
        }
        let receiver = match (&self.webhook, &self.command, &self.alertmanager) {
            (Some(endpoint), None, None) => endpoint.webhook(name, folder)?,
            (None, Some(argv), None) if argv.is_empty() => {
                return Err(wrong("command is empty: write [PROGRAM, ARGUMENT, …]".to_owned()));
            }
            (None, Some(argv), None) => AlertReceiver::Command(argv.clone()),
            (None, None, Some(endpoint)) => endpoint.alertmanager(name)?,
            _ => return Err(wrong("must have exactly one of webhook, command and alertmanager".to_owned())),
        };
        let duration = |field: &str, text: &Option<String>, default: Duration| match text {
            None => Ok(default),
            Some(text) => milliseconds(text)
                .map(Duration::from_millis)
                .map_err(|why| wrong(format!("{field}: {text:?} is not {why}"))),
        };
        let default = RouteRules::default();
        let timeout = duration("timeout", &self.timeout, TIMEOUT)?;
        if timeout.is_zero() || timeout > Duration::from_secs(300) {
            return Err(wrong("timeout must be greater than 0 and at most 5m".to_owned()));
        }
        let repeat = duration("repeat", &self.repeat, default.repeat)?;
        if repeat < Duration::from_secs(1) {
            return Err(wrong("repeat must be at least 1s".to_owned()));
        }
        let rules = RouteRules {
            namespaces: self.namespaces.clone(),
            min_severity: self.severity.unwrap_or(default.min_severity),
            kinds: self.alerts.clone(),
            send_recoveries: self.recoveries.unwrap_or(default.send_recoveries),
            wait: duration("wait", &self.wait, default.wait)?,
            settle: duration("settle", &self.settle, default.settle)?,
            interval: duration("interval", &self.interval, default.interval)?,
            repeat,
        };
        Ok(AlertRoute { name: name.to_owned(), receiver, rules, timeout })
    }
}

impl EndpointEntry {
    fn webhook(&self, route: &str, folder: &Path) -> Result<AlertReceiver, Failure> {
        let wrong =
            |why: String| Failure::new(Exit::Usage, format!("notify route {route:?}: webhook: {why}"));
        let signature = match &self.sign {
            None => None,
            Some(SignEntry { scheme, secret }) => {
                let known = SignatureScheme::ALL;
                let found = known.into_iter().find(|one| one.word() == scheme).ok_or_else(|| {
                    let words = known.map(SignatureScheme::word).join(" or ");
                    wrong(format!("sign: unknown scheme {scheme:?}: use {words}"))
                })?;
                Some((found, secret.read(&format!("notify route {route:?}: webhook.sign.secret"))?))
            }
        };
        let what = format!("notify route {route:?}: webhook");
        let template = self.template.as_ref().map(|file| template(&what, &folder.join(file))).transpose()?;
        let is_feishu = matches!(signature, Some((SignatureScheme::Feishu, _)));
        if is_feishu
            && !template.as_ref().is_some_and(|template| template.uses("sign") && template.uses("timestamp"))
        {
            let why = "sign: feishu needs a template with {{timestamp}} and {{sign}}";
            return Err(wrong(why.to_owned()).hint("start from examples/notify/feishu.json"));
        }
        let client = self.client(&what, "")?;
        Ok(AlertReceiver::Webhook { client, template, signature })
    }

    fn alertmanager(&self, route: &str) -> Result<AlertReceiver, Failure> {
        let what = format!("notify route {route:?}: alertmanager");
        if self.template.is_some() || self.sign.is_some() {
            let why = "Alertmanager has its own templates: remove template and sign";
            return Err(Failure::new(Exit::Usage, format!("{what}: {why}")));
        }
        self.client(&what, "/api/v2/alerts").map(AlertReceiver::Alertmanager)
    }

    fn client(&self, what: &str, path: &str) -> Result<WebhookClient, Failure> {
        let url = self.url.read(&format!("{what}.url"))?;
        let url = if path.is_empty() { url } else { format!("{}{path}", url.trim_end_matches('/')) };
        let mut config = ClientConfig {
            ca_file: self.ca_file.clone(),
            proxy: self.proxy.clone(),
            insecure: self.insecure,
            ..ClientConfig::default()
        };
        if let Err(plain @ AddressError::Plain(_)) = config.check(&url) {
            return Err(Failure::new(Exit::Usage, format!("{what}: {plain}"))
                .hint("use https, or set `insecure: true` for this route"));
        }
        for (header, value) in &self.headers {
            config.headers.push((header.clone(), value.read(&format!("{what}.headers.{header}"))?));
        }
        WebhookClient::with_config(&url, &config)
            .map_err(|error| Failure::new(Exit::Usage, format!("{what}: {}", chain(&error))))
    }
}

/// `what`: the setting, for messages.
fn template(what: &str, file: &Path) -> Result<MessageTemplate, Failure> {
    use std::io::Read;
    let failed =
        |why: String| Failure::new(Exit::Usage, format!("{what}: template {}: {why}", file.display()));
    // A FIFO would block the reader.
    if std::fs::metadata(file).is_ok_and(|meta| !meta.is_file()) {
        return Err(failed("not a regular file".to_owned()));
    }
    let mut text = String::new();
    std::fs::File::open(file)
        .and_then(|file| file.take(MAX_TEMPLATE).read_to_string(&mut text))
        .map_err(|error| failed(error.to_string()))?;
    MessageTemplate::parse(&text, PLACEHOLDERS).map_err(|error| failed(chain(&error)))
}
