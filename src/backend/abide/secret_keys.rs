//! Key ring: the keys of digests that the gateway provided, by id.
//!
//! A page or a change has the keys of its rows, as far as the grant of this client covers their owners.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use crate::model::{DigestKey, DigestKeyRef};

#[derive(Clone, Default)]
pub(super) struct SecretKeyRing(Arc<Mutex<BTreeMap<String, Arc<DigestKey>>>>);

impl SecretKeyRing {
    /// Adds keys in hex. A key of another form is left out: its rows are held.
    pub(super) fn add(&self, keys: &BTreeMap<String, String>) {
        if keys.is_empty() {
            return;
        }
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        for (id, text) in keys.iter().filter(|(id, _)| !known.contains_key(*id)).collect::<Vec<_>>() {
            let bytes = hex::decode(text).ok().and_then(|bytes| bytes.try_into().ok());
            if let Some(key) = bytes.map(DigestKey::new).filter(|key| key.id() == id) {
                known.insert(id.clone(), Arc::new(key));
            }
        }
    }

    pub(super) fn get(&self, id: &str) -> DigestKeyRef {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known
            .get(id)
            .map_or_else(|| DigestKeyRef::Unknown(id.into()), |key| DigestKeyRef::Known(Arc::clone(key)))
    }
}
