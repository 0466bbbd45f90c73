//! Small answers: health of a server, acceptance, errors, the version, and config files.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Answer of `/healthz` and `/readyz`: `ok`, or the cause.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServerHealth {
    pub status: String,
}

impl ServerHealth {
    pub fn ok() -> ServerHealth {
        ServerHealth { status: "ok".to_owned() }
    }
}

/// An error of the controller's API.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ErrorBody {
    pub error: String,
}

/// The controller starts a pass, or had done so for an earlier delivery of the same webhook.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Accepted {
    Accepted(bool),
    Repeated(bool),
}

/// `abide version -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VersionInfo {
    pub name: String,
    pub version: String,
    pub os: String,
    pub arch: String,
    #[serde(rename = "apiVersion")]
    pub api_version: String,
}

/// Reason why a config file is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ConfigOrigin {
    /// By --config or ABIDE_CONFIG.
    Given,
    /// In the current directory.
    Found,
    /// ~/.config/abide/config.yaml
    User,
}

/// One file of `abide config show -o json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ConfigFileRow {
    pub file: String,
    pub origin: ConfigOrigin,
    pub trusted: bool,
    pub targets: Vec<String>,
}
