//! Holds and pauses: requests of a person that keep the controller from changing an instance or a namespace.

use serde::{Deserialize, Serialize};

use super::{InstanceKey, Name, Time};

/// Created by a manual operation, so that no plan undoes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub instance: InstanceKey,
    pub by: String,
    pub reason: Option<String>,
    /// `None`: until it is released.
    pub until: Option<Time>,
}

/// No plan changes a namespace, or any process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// `None`: everywhere.
    pub namespace: Option<Name>,
    pub by: String,
    pub reason: Option<String>,
    pub until: Option<Time>,
}
