//! Holds and pauses: `get holds -o json`, the status of the controller, and its pause requests.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::model::{Hold, InstanceKey, Name, Pause};

/// One row of `get holds`: a hold, a pause, or an instance that `watch` has given up on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HoldRow {
    /// An instance, `namespace NAME` or `everything`.
    pub what: String,
    pub by: String,
    pub reason: Option<String>,
    pub until: Option<String>,
}

/// The hold of an instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HoldEntry {
    pub instance: InstanceKey,
    pub by: String,
    pub reason: Option<String>,
    pub until: Option<String>,
}

/// The hold of an instance that is described by its context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct HoldDetails {
    pub by: String,
    pub reason: Option<String>,
    pub until: Option<String>,
}

/// The pause of a namespace; `null`: of everything.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PauseEntry {
    pub namespace: Option<Name>,
    pub by: String,
    pub reason: Option<String>,
    pub until: Option<String>,
}

impl From<&Hold> for HoldEntry {
    fn from(hold: &Hold) -> HoldEntry {
        let Hold { instance, by, reason, until } = hold.clone();
        HoldEntry { instance, by, reason, until: until.map(|time| time.to_string()) }
    }
}

impl From<&Hold> for HoldDetails {
    fn from(hold: &Hold) -> HoldDetails {
        let HoldEntry { by, reason, until, .. } = HoldEntry::from(hold);
        HoldDetails { by, reason, until }
    }
}

impl From<&Hold> for HoldRow {
    fn from(hold: &Hold) -> HoldRow {
        let HoldEntry { instance, by, reason, until } = HoldEntry::from(hold);
        HoldRow { what: instance.to_string(), by, reason, until }
    }
}

impl From<&Pause> for PauseEntry {
    fn from(pause: &Pause) -> PauseEntry {
        let Pause { namespace, by, reason, until } = pause.clone();
        PauseEntry { namespace, by, reason, until: until.map(|time| time.to_string()) }
    }
}

impl From<&Pause> for HoldRow {
    fn from(pause: &Pause) -> HoldRow {
        let PauseEntry { namespace, by, reason, until } = PauseEntry::from(pause);
        let what = namespace.map_or("everything".to_owned(), |name| format!("namespace {name}"));
        HoldRow { what, by, reason, until }
    }
}

/// Body of `POST /api/v1/pause` and `POST /api/v1/resume`: either a namespace or all.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct PauseRequest {
    pub namespace: Option<Name>,
    #[serde(default)]
    pub all: bool,
    /// A duration such as `2h`, or a time.
    pub until: Option<String>,
    pub reason: Option<String>,
    pub by: Option<String>,
}

/// Answer of `POST /api/v1/pause`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Paused {
    pub paused: PauseEntry,
}

/// Answer of `POST /api/v1/resume`; `null`, with a message: nothing was paused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Resumed {
    pub resumed: Option<ResumedScope>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ResumedScope {
    pub namespace: Option<Name>,
}
