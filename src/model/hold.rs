//! What a person asked for beside the manifests: leave this instance as I left it; leave this namespace alone.

use serde::{Deserialize, Serialize};

use super::{InstanceKey, Name, Time};

/// Left by an operation that somebody did by hand, so that nothing undoes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub instance: InstanceKey,
    pub by: String,
    pub reason: Option<String>,
    /// `None`: until it is released.
    pub until: Option<Time>,
}

/// Nothing is done in a namespace, or anywhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pause {
    /// `None`: everywhere.
    pub namespace: Option<Name>,
    pub by: String,
    pub reason: Option<String>,
    pub until: Option<Time>,
}

impl Pause {
    /// Where a pause is kept. One of everything has a name that no namespace can have.
    pub fn store_key(namespace: Option<&Name>) -> String {
        namespace.map_or("pause/*".to_owned(), |name| format!("pause/{name}"))
    }
}
