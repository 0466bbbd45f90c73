//! Trim of overfilled stores: reports that an earlier version stored beyond the limits of a host.
//!
//! The store reads all its entries into memory, so the trim chooses by keys and sizes before that. Only reports are
//! deleted: the agent sends them again when it joins. Registrations stay, because nothing tells who made them.

use std::collections::HashMap;

use tracing::warn;

use super::report_limits::{MAX_HOST_BYTES, MAX_INSTANCES};
use crate::model::HostKey;
use crate::store::keys;

/// Reports and registrations of one host in the store.
#[derive(Default)]
struct StoredReports {
    /// Size and key of each report.
    reports: Vec<(usize, String)>,
    registered_bytes: usize,
}

impl StoredReports {
    /// The largest reports, as many as exceed the limits.
    fn excess(mut self, host: &HostKey) -> Vec<String> {
        let mut bytes = self.registered_bytes + self.reports.iter().map(|(size, _)| size).sum::<usize>();
        if bytes <= MAX_HOST_BYTES && self.reports.len() <= MAX_INSTANCES {
            return Vec::new();
        }
        self.reports.sort();
        let (before, mut excess) = (bytes, Vec::new());
        while bytes > MAX_HOST_BYTES || self.reports.len() > MAX_INSTANCES {
            let Some((size, key)) = self.reports.pop() else { break };
            bytes -= size;
            excess.push(key);
        }
        warn!(
            %host, before, after = bytes, deleted = excess.len(),
            "store is overfilled: reports of a host deleted, at most {MAX_HOST_BYTES} bytes and {MAX_INSTANCES} instances are kept"
        );
        if bytes > MAX_HOST_BYTES {
            warn!(%host, bytes, "registrations of a host exceed the limit of its reports: unregister those that it does not need");
        }
        excess
    }
}

/// The keys of the reports that exceed the limits of their hosts.
pub fn excess_reports(entries: &mut dyn Iterator<Item = (String, usize)>) -> Vec<String> {
    let mut hosts: HashMap<HostKey, StoredReports> = HashMap::new();
    for (key, size) in entries {
        let is_registration = key.starts_with(keys::REGISTRATION_PREFIX);
        let is_report = key.starts_with(keys::REPORT_PREFIX) || key.starts_with(keys::FAILED_START_PREFIX);
        if !is_registration && !is_report {
            continue;
        }
        let Some(host) = key.splitn(4, '/').nth(3).and_then(|host| host.parse().ok()) else { continue };
        let stored = hosts.entry(host).or_default();
        match is_registration {
            true => stored.registered_bytes += size,
            false => stored.reports.push((size, key)),
        }
    }
    hosts.into_iter().flat_map(|(host, stored)| stored.excess(&host)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_reports_of_an_overfilled_host_are_chosen() {
        let row = |prefix: &str, name: &str, host: &str, size| (format!("{prefix}web/{name}/{host}"), size);
        let half = MAX_HOST_BYTES / 2;
        let mut entries = [
            row("live/", "small", "0:10.0.0.1", 100),
            row("live/", "large", "0:10.0.0.1", half + 1),
            row("failed/", "other", "0:10.0.0.1", half),
            row("reg/", "small", "0:10.0.0.1", 200),
            row("live/", "full", "0:10.0.0.2", MAX_HOST_BYTES),
            row("reg/", "huge", "0:10.0.0.3", 2 * MAX_HOST_BYTES),
            ("task/1".to_owned(), 2 * MAX_HOST_BYTES),
        ]
        .into_iter();
        assert_eq!(excess_reports(&mut entries), ["live/web/large/0:10.0.0.1"]);
        let many = |count| (0..count).map(|n| row("live/", &format!("p{n}"), "0:10.0.0.1", 10));
        assert_eq!(excess_reports(&mut many(MAX_INSTANCES)), [""; 0]);
        assert_eq!(excess_reports(&mut many(MAX_INSTANCES + 5)).len(), 5);
    }
}
