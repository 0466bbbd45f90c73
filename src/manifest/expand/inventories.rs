//! Inventory resolution: selects the hosts of groups from snapshots of inventories.

use std::collections::BTreeMap;

use super::super::Declaration;
use super::super::check::{DeclaredObject, GroupMember, InventorySelection};
use super::super::inventory::InventoryHosts;
use super::super::problem::{Code, FieldPath, PathProblem};
use super::{Findings, Purpose};

/// Maximum number of hosts that the groups of a tree may test with their selectors.
const MAX_TESTS: usize = 50_000_000;

/// Snapshots by the name of their inventory.
pub struct InventoryIndex<'a> {
    known: BTreeMap<&'a str, &'a InventoryHosts>,
    purpose: Purpose,
    tests: usize,
}

impl<'a> InventoryIndex<'a> {
    pub fn collect(documents: &'a [Declaration], purpose: Purpose) -> InventoryIndex<'a> {
        let mut known = BTreeMap::new();
        for document in documents {
            if let DeclaredObject::Inventory(inventory) = &document.declared {
                known.insert(inventory.name.as_str(), &**inventory);
            }
        }
        InventoryIndex { known, purpose, tests: 0 }
    }

    /// The hosts that a group selects. `None`: they are not known.
    pub fn select(
        &mut self,
        at: usize,
        from: &InventorySelection,
        found: &mut Findings,
    ) -> Option<Vec<&'a GroupMember>> {
        let path = FieldPath::of("from");
        let Some(inventory) = self.known.get(from.inventory.as_str()) else {
            // Without a target, nothing is read from inventories.
            if self.purpose == Purpose::Instances {
                let message = format!("the hosts of inventory {:?} are not known", from.inventory);
                let finding = PathProblem::new(Code::InventoryUnknown, path.key("inventory"), message);
                let hint = format!("`abide inventory show {}` reads it", from.inventory);
                found.push((at, finding.hint(hint)));
            }
            return None;
        };
        let Some(selector) = &from.select else { return Some(inventory.hosts.iter().collect()) };
        self.tests = self.tests.saturating_add(inventory.hosts.len());
        if self.tests > MAX_TESTS {
            let message = format!("the selectors of all groups test more than {MAX_TESTS} hosts");
            let finding = PathProblem::new(Code::TooLarge, path.key("select"), message);
            found.push((at, finding.hint("use fewer groups, and select their hosts with `labels`")));
            return None;
        }
        Some(inventory.hosts.iter().filter(|member| member.labels.is_selected(selector)).collect())
    }
}
