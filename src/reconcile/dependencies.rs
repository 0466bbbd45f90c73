//! Dependency index: the instances behind each name in `depends_on`, and the depth of each name.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::model::{Desired, DesiredInstance, HostKey, InstanceKey, ProcessKey};

/// The instances of each name that occurs in a `depends_on`.
pub struct DependencyIndex<'a>(BTreeMap<&'a ProcessKey, Vec<(&'a InstanceKey, &'a DesiredInstance)>>);

impl<'a> DependencyIndex<'a> {
    pub fn new(desired: &'a Desired, names: &BTreeSet<&'a ProcessKey>) -> DependencyIndex<'a> {
        let mut all: BTreeMap<&ProcessKey, Vec<(&InstanceKey, &DesiredInstance)>> = BTreeMap::new();
        if names.is_empty() {
            return DependencyIndex(all);
        }
        for (key, want) in &desired.instances {
            let own = key.process();
            // A name refers to all instances declared under it, or to the instance with that name.
            for name in [names.get(&want.origin.declared), names.get(&own)].into_iter().flatten() {
                let named = all.entry(name).or_default();
                if named.last().is_none_or(|(last, _)| *last != key) {
                    named.push((key, want));
                }
            }
        }
        DependencyIndex(all)
    }

    /// All instances of a name: a dependent waits for those on its own host or, if there are none, for all.
    pub fn all(&self, name: &ProcessKey) -> &[(&'a InstanceKey, &'a DesiredInstance)] {
        self.0.get(name).map(Vec::as_slice).unwrap_or_default()
    }

    pub fn here(&self, name: &ProcessKey, host: &HostKey) -> &[(&'a InstanceKey, &'a DesiredInstance)] {
        // Sorted by key, and a key starts with its host.
        let all = self.all(name);
        let from = all.partition_point(|(key, _)| key.host < *host);
        let count = all[from..].partition_point(|(key, _)| key.host == *host);
        &all[from..from + count]
    }

    /// The length of the longest dependency path of each name. A cycle, which validation rejects, is cut where it
    /// closes.
    pub fn ranks(&self, desired: &'a Desired) -> HashMap<&'a ProcessKey, usize> {
        if self.0.is_empty() {
            return HashMap::new();
        }
        let mut edges: BTreeMap<&ProcessKey, BTreeSet<&ProcessKey>> = BTreeMap::new();
        for want in desired.instances.values() {
            let origin = &want.origin;
            let to = edges.entry(&origin.declared).or_default();
            for name in &origin.depends_on {
                let declared = self.all(name).first().map(|(_, want)| &want.origin.declared);
                to.extend(declared);
            }
        }
        let mut ranks: HashMap<&ProcessKey, usize> = HashMap::new();
        let mut open: BTreeSet<&ProcessKey> = BTreeSet::new();
        for start in edges.keys().copied() {
            // Without recursion: the length of a dependency path is not bounded.
            let mut path = vec![start];
            while let Some(name) = path.last().copied() {
                open.insert(name);
                let below = edges.get(name);
                let next = below.iter().flat_map(|below| below.iter());
                let next = next.copied().find(|below| !ranks.contains_key(below) && !open.contains(below));
                if let Some(next) = next {
                    path.push(next);
                    continue;
                }
                let deepest =
                    below.iter().flat_map(|below| below.iter()).filter_map(|below| ranks.get(below)).max();
                ranks.insert(name, deepest.map_or(0, |rank| rank + 1));
                open.remove(name);
                path.pop();
            }
        }
        ranks
    }
}
