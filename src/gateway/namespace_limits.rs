//! Limits of a namespace: requests in flight that name it, and the bytes of their bodies. A call above a limit gets 429.
//!
//! The apps file has them for a namespace by its name, or for each other one as `*`. A request counts once for every
//! namespace that it names, with its whole body.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use super::ApiError;
use crate::access::{NamespaceLimitTable, NamespaceLimits};
use crate::model::count;

#[derive(Clone, Copy, Debug, Default)]
struct NamespaceUsage {
    requests: usize,
    bytes: usize,
}

/// Requests in flight by namespace.
#[derive(Clone, Default)]
pub struct NamespaceShares(Arc<Mutex<HashMap<String, NamespaceUsage>>>);

impl NamespaceShares {
    fn usage(&self) -> MutexGuard<'_, HashMap<String, NamespaceUsage>> {
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn charge(&self, namespace: &str, limits: NamespaceLimits, bytes: usize) -> Result<(), ApiError> {
        let mut all = self.usage();
        let own = all.get(namespace).copied().unwrap_or_default();
        if let Some(most) = limits.requests.filter(|most| own.requests >= *most) {
            let most = count(most, "request");
            return Err(ApiError::Busy(format!(
                "namespace {namespace} may have at most {most} in flight (namespaces.{namespace}.requests)"
            )));
        }
        if let Some(most) = limits.bytes.filter(|most| own.bytes.saturating_add(bytes) > *most) {
            return Err(ApiError::Busy(format!(
                "namespace {namespace} may have at most {most} bytes of requests in flight, and the call adds {bytes} \
                 (namespaces.{namespace}.bytes)"
            )));
        }
        let own = all.entry(namespace.to_owned()).or_default();
        own.requests += 1;
        own.bytes += bytes;
        Ok(())
    }

    fn release(&self, namespace: &str, bytes: usize) {
        let mut all = self.usage();
        let Some(own) = all.get_mut(namespace) else { return };
        own.requests = own.requests.saturating_sub(1);
        own.bytes = own.bytes.saturating_sub(bytes);
        if own.requests == 0 {
            all.remove(namespace);
        }
    }
}

/// The namespaces of one request, released on drop.
#[derive(Default)]
pub struct NamespaceGate {
    /// `None`: no namespace has a limit.
    limited: Option<(Arc<NamespaceLimitTable>, NamespaceShares)>,
    /// Bytes of the request's body.
    bytes: usize,
    entered: Vec<String>,
}

impl NamespaceGate {
    pub fn new(limits: &Arc<NamespaceLimitTable>, shares: &NamespaceShares, bytes: usize) -> NamespaceGate {
        let limited = (!limits.is_empty()).then(|| (Arc::clone(limits), shares.clone()));
        NamespaceGate { limited, bytes, entered: Vec::new() }
    }

    /// Counts the request for a namespace that it names.
    pub fn enter(&mut self, namespace: &str) -> Result<(), ApiError> {
        let Some((table, shares)) = &self.limited else { return Ok(()) };
        let limits = table.get(namespace).or_else(|| table.get("*"));
        let Some(limits) = limits.copied().filter(|_| !self.entered.iter().any(|name| name == namespace))
        else {
            return Ok(());
        };
        shares.charge(namespace, limits, self.bytes)?;
        self.entered.push(namespace.to_owned());
        Ok(())
    }
}

impl Drop for NamespaceGate {
    fn drop(&mut self) {
        if let Some((_, shares)) = &self.limited {
            self.entered.iter().for_each(|namespace| shares.release(namespace, self.bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_has_its_own_limit_and_a_dropped_request_releases_it() {
        let table: NamespaceLimitTable = [
            ("web".to_owned(), NamespaceLimits { requests: Some(2), bytes: Some(100) }),
            ("*".to_owned(), NamespaceLimits { requests: Some(1), bytes: None }),
        ]
        .into();
        let (table, shares) = (Arc::new(table), NamespaceShares::default());
        let gate = |bytes: usize| NamespaceGate::new(&table, &shares, bytes);
        let (mut one, mut two, mut three) = (gate(60), gate(50), gate(10));
        assert!(one.enter("web").is_ok() && one.enter("web").is_ok(), "a request counts once");
        let message = two.enter("web").expect_err("110 bytes").to_string();
        assert!(
            message.contains("at most 100 bytes") && message.contains("namespaces.web.bytes"),
            "{message}"
        );
        assert!(three.enter("web").is_ok());
        let message = gate(0).enter("web").expect_err("a third").to_string();
        assert!(message.contains("at most 2 requests in flight"), "{message}");
        assert!(two.enter("web2").is_ok() && three.enter("web2").is_err() && three.enter("Web").is_ok());
        drop(one);
        assert!(two.enter("web").is_ok());
        drop((two, three));
        assert!(shares.usage().is_empty());
    }
}
