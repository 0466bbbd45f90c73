//! Trim of overfilled stores: reports and registrations that an earlier version stored beyond the limits of a host.
//!
//! The store reads all its entries into memory, so the trim chooses by keys and sizes before that. Reports are deleted:
//! the agent sends them again when it joins. Registrations may be those of an app, so they are moved to a file next to the
//! store; an agent that holds the process registers it again. The largest ones go first. All hosts together are bounded
//! too, and hosts with few registrations lose none.

use std::collections::HashMap;

use tracing::warn;

use super::report_limits::{MAX_HOST_BYTES, MAX_INSTANCES};
use crate::model::HostKey;
use crate::store::{TrimChoice, keys};

/// Maximum bytes of the registrations of all hosts.
const MAX_REGISTERED_BYTES: usize = 2 << 30;

/// Sizes and keys of entries.
type SizedKeys = Vec<(usize, String)>;

/// Reports and registrations of one host in the store.
#[derive(Default)]
struct StoredEntries {
    reports: SizedKeys,
    registrations: SizedKeys,
}

fn sum(entries: &SizedKeys) -> usize {
    entries.iter().map(|(size, _)| size).sum()
}

impl StoredEntries {
    /// Takes the largest registrations, as many as exceed `most` bytes.
    fn excess_registrations(&mut self, host: &HostKey, most: usize) -> Vec<String> {
        let (before, mut excess) = (sum(&self.registrations), Vec::new());
        let mut bytes = before;
        if bytes > most {
            self.registrations.sort();
        }
        while bytes > most {
            let Some((size, key)) = self.registrations.pop() else { break };
            bytes -= size;
            excess.push(key);
        }
        if !excess.is_empty() {
            warn!(
                %host, before, after = bytes, set_aside = excess.len(),
                "store is overfilled: registrations of a host are set aside, at most {most} bytes are kept"
            );
        }
        excess
    }

    /// Takes the largest reports, as many as exceed the limits.
    fn excess_reports(&mut self, host: &HostKey) -> Vec<String> {
        let mut bytes = sum(&self.registrations) + sum(&self.reports);
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
        excess
    }
}

/// The largest share of each host in `most` bytes: hosts below it keep everything.
fn fair_share(mut sums: Vec<usize>, mut most: usize) -> usize {
    sums.sort_unstable();
    for (nth, bytes) in sums.iter().enumerate() {
        let share = most / (sums.len() - nth);
        if *bytes > share {
            return share.min(MAX_HOST_BYTES);
        }
        most -= bytes;
    }
    MAX_HOST_BYTES
}

/// The entries that exceed the limits of their hosts.
pub fn excess_entries(entries: &mut dyn Iterator<Item = (String, usize)>) -> TrimChoice {
    excess(entries, MAX_REGISTERED_BYTES)
}

fn excess(entries: &mut dyn Iterator<Item = (String, usize)>, most_registered: usize) -> TrimChoice {
    let mut hosts: HashMap<HostKey, StoredEntries> = HashMap::new();
    for (key, size) in entries {
        let is_registration = key.starts_with(keys::REGISTRATION_PREFIX);
        let is_report = key.starts_with(keys::REPORT_PREFIX) || key.starts_with(keys::FAILED_START_PREFIX);
        if !is_registration && !is_report {
            continue;
        }
        let Some(host) = key.splitn(4, '/').nth(3).and_then(|host| host.parse().ok()) else { continue };
        let stored = hosts.entry(host).or_default();
        let entries = if is_registration { &mut stored.registrations } else { &mut stored.reports };
        entries.push((size, key));
    }
    let sums = hosts.values().map(|stored| sum(&stored.registrations).min(MAX_HOST_BYTES)).collect();
    let share = fair_share(sums, most_registered);
    let mut choice = TrimChoice::default();
    for (host, mut stored) in hosts {
        let registrations = stored.excess_registrations(&host, share);
        choice.deleted.extend(stored.excess_reports(&host));
        if registrations.is_empty() {
            continue;
        }
        // A process without a registration holds no identity.
        let instances: Vec<_> = registrations.iter().filter_map(|key| keys::instance_of(key)).collect();
        choice.deleted.extend(instances.iter().map(keys::claim));
        let processes = instances.iter().map(|instance| instance.process().to_string()).collect();
        choice.index_entries.push((keys::identities_prefix(&host), processes));
        choice.set_aside.extend(registrations);
    }
    choice
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(prefix: &str, name: &str, host: &str, size: usize) -> (String, usize) {
        (format!("{prefix}web/{name}/{host}"), size)
    }

    #[test]
    fn the_largest_reports_of_an_overfilled_host_are_chosen() {
        let half = MAX_HOST_BYTES / 2;
        let mut entries = [
            row("live/", "small", "0:10.0.0.1", 100),
            row("live/", "large", "0:10.0.0.1", half + 1),
            row("failed/", "other", "0:10.0.0.1", half),
            row("reg/", "small", "0:10.0.0.1", 200),
            row("live/", "full", "0:10.0.0.2", MAX_HOST_BYTES),
            ("task/1".to_owned(), 2 * MAX_HOST_BYTES),
        ]
        .into_iter();
        let choice = excess_entries(&mut entries);
        assert_eq!(choice.deleted, ["live/web/large/0:10.0.0.1"]);
        assert!(choice.set_aside.is_empty() && choice.index_entries.is_empty());
        let many = |count| (0..count).map(|n| row("live/", &format!("p{n}"), "0:10.0.0.1", 10));
        assert_eq!(excess_entries(&mut many(MAX_INSTANCES)), TrimChoice::default());
        assert_eq!(excess_entries(&mut many(MAX_INSTANCES + 5)).deleted.len(), 5);
    }

    #[test]
    fn the_largest_registrations_of_an_overfilled_host_are_set_aside() {
        let mut entries = [
            row("reg/", "huge", "0:10.0.0.3", MAX_HOST_BYTES),
            row("reg/", "small", "0:10.0.0.3", 100),
            row("live/", "small", "0:10.0.0.3", 100),
            row("reg/", "full", "0:10.0.0.4", MAX_HOST_BYTES),
        ]
        .into_iter();
        let choice = excess_entries(&mut entries);
        assert_eq!(choice.set_aside, ["reg/web/huge/0:10.0.0.3"]);
        assert_eq!(choice.deleted, ["claim/0:10.0.0.3/web/huge"]);
        let index = choice.index_entries;
        assert_eq!(index, [("identity/0:10.0.0.3/".to_owned(), vec!["web/huge".to_owned()])]);
    }

    #[test]
    fn all_hosts_together_are_bounded_and_small_ones_lose_nothing() {
        assert_eq!(fair_share(vec![10, 20, 900, 800], 1000), 485);
        assert_eq!(fair_share(vec![10, 20], 1000), MAX_HOST_BYTES);
        let mut entries = (0..10)
            .flat_map(|n| {
                (0..10).map(move |nth| row("reg/", &format!("p{nth}"), &format!("0:10.0.1.{n}"), 100))
            })
            .chain([row("reg/", "small", "0:10.0.0.9", 10)]);
        let choice = excess(&mut entries, 5010);
        assert_eq!(choice.set_aside.len(), 50);
        assert!(!choice.set_aside.iter().any(|key| key.contains("small")));
    }
}
