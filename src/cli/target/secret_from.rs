//! Secrets of the config file: only their location is in the file.

use std::path::PathBuf;

use serde::Deserialize;

use crate::cli::{Exit, Failure};

/// Location of a secret.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SecretFrom {
    env: Option<String>,
    file: Option<PathBuf>,
}

impl SecretFrom {
    /// `what`: the setting, for messages.
    pub fn read(&self, what: &str) -> Result<String, Failure> {
        let failed = |why: String| Failure::new(Exit::Usage, format!("{what}: {why}"));
        match (&self.env, &self.file) {
            (Some(name), None) => std::env::var(name).map_err(|_| {
                failed(format!("the variable {name} is not set"))
                    .hint(format!("export {name} in this shell or pipeline, or write {{file: PATH}} here"))
            }),
            (None, Some(file)) => std::fs::read_to_string(file)
                .map(|text| text.trim().to_owned())
                .map_err(|error| failed(format!("cannot read {}: {error}", file.display()))),
            _ => Err(failed("must be {env: NAME} or {file: PATH}".to_owned())),
        }
    }
}

/// A value, or its location.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum TextOrSecret {
    Text(String),
    Secret(SecretFrom),
}

impl TextOrSecret {
    /// `what`: the setting, for messages.
    pub fn read(&self, what: &str) -> Result<String, Failure> {
        match self {
            TextOrSecret::Text(text) => Ok(text.clone()),
            TextOrSecret::Secret(secret) => secret.read(what),
        }
    }
}
