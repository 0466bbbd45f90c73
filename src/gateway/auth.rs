//! Who asks: an app with a code and a secret, and the namespaces that it may touch.
//!
//! Secrets are kept as digests and compared in constant time. Without credentials only health answers.

use std::fmt;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::model::glob;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Apps(Vec<App>);

#[derive(Clone, PartialEq, Eq)]
pub struct App {
    pub code: String,
    secret: [u8; 32],
    namespaces: Vec<String>,
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "App({})", self.code)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    apps: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    code: String,
    secret: Option<String>,
    secret_sha256: Option<String>,
    #[serde(default = "everywhere")]
    namespaces: Vec<String>,
}

fn everywhere() -> Vec<String> {
    vec!["*".to_owned()]
}

impl Apps {
    pub fn read(file: &Path) -> Result<Apps, String> {
        let text = std::fs::read_to_string(file)
            .map_err(|error| format!("cannot read {}: {error}", file.display()))?;
        Apps::parse(&text).map_err(|error| format!("{}: {error}", file.display()))
    }

    /// Messages name no secret.
    pub fn parse(text: &str) -> Result<Apps, String> {
        let file: File = serde_yaml::from_str(text).map_err(|error| match error.location() {
            Some(at) => format!("it cannot be understood (line {})", at.line()),
            None => "it cannot be understood".to_owned(),
        })?;
        let mut apps = Vec::new();
        for entry in file.apps {
            let secret = match (entry.secret, entry.secret_sha256) {
                (Some(secret), None) if !secret.is_empty() => Sha256::digest(secret.as_bytes()).into(),
                (None, Some(hex)) => from_hex(&hex)
                    .ok_or(format!("app {:?}: secret_sha256 is not 64 hex digits", entry.code))?,
                _ => return Err(format!("app {:?} needs either secret or secret_sha256", entry.code)),
            };
            if apps.iter().any(|app: &App| app.code == entry.code) {
                return Err(format!("app {:?} is there twice", entry.code));
            }
            apps.push(App { code: entry.code, secret, namespaces: entry.namespaces });
        }
        Ok(Apps(apps))
    }

    /// The app that these credentials are of. Every app is compared, so that time tells nothing.
    pub fn known(&self, code: &str, secret: &str) -> Option<&App> {
        let digest: [u8; 32] = Sha256::digest(secret.as_bytes()).into();
        let mut found = None;
        for app in &self.0 {
            let same = app.code.as_bytes().ct_eq(code.as_bytes()) & app.secret.ct_eq(&digest);
            if bool::from(same) {
                found = Some(app);
            }
        }
        found
    }
}

impl App {
    pub fn may_touch(&self, namespace: &str) -> bool {
        self.namespaces.iter().any(|pattern| glob(pattern, namespace))
    }
}

/// Code and secret: from the header that the API gateway uses, or from the body, as ESB's callers send them.
pub fn credentials(header: Option<&str>, body: &Value) -> Option<(String, String)> {
    let from = |value: &Value| {
        let text = |name: &str| value.get(name)?.as_str().map(str::to_owned);
        Some((text("bk_app_code")?, text("bk_app_secret")?))
    };
    let header: Option<Value> = header.and_then(|text| serde_json::from_str(text).ok());
    header.as_ref().and_then(from).or_else(|| from(body))
}

fn from_hex(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 64 || !text.is_ascii() {
        return None;
    }
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const FILE: &str = "apps:\n  - {code: shop, secret: hush, namespaces: [web, 'web-*']}\n  - {code: all, secret_sha256: \
                        9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08}\n";

    #[test]
    fn who_is_known_and_where() {
        let apps = Apps::parse(FILE).expect("a file");
        let shop = apps.known("shop", "hush").expect("known");
        assert!(shop.may_touch("web") && shop.may_touch("web-2") && !shop.may_touch("db"));
        assert!(apps.known("all", "test").expect("known").may_touch("anything"));
        for (code, secret) in
            [("shop", "Hush"), ("shop", ""), ("", "hush"), ("all", "hush"), ("nobody", "hush")]
        {
            assert_eq!(apps.known(code, secret), None, "{code} {secret}");
        }
        assert!(!format!("{apps:?}").contains("hush"));
    }

    #[test]
    fn a_bad_file_is_refused_without_telling_secrets() {
        for text in [
            "apps: [{code: a}]",
            "apps: [{code: a, secret: x, secret_sha256: y}]",
            "apps: [{code: a, secret_sha256: hush}]",
            "apps: [{code: a, secret: hush}, {code: a, secret: x}]",
            "apps: [{code: a, secret: [hush]}]",
            "nothing",
        ] {
            let error = Apps::parse(text).expect_err(text);
            assert!(!error.contains("hush"), "{error}");
        }
    }

    #[test]
    fn credentials_come_in_two_places() {
        let body = json!({"bk_app_code": "a", "bk_app_secret": "s", "bk_username": "admin"});
        assert_eq!(credentials(None, &body), Some(("a".into(), "s".into())));
        let header = r#"{"bk_app_code": "b", "bk_app_secret": "t"}"#;
        assert_eq!(credentials(Some(header), &body), Some(("b".into(), "t".into())), "the header goes first");
        assert_eq!(credentials(Some("nonsense"), &json!({})), None);
    }
}
