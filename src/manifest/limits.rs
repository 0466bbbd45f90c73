//! How much a tree of manifests may hold. Past a limit is a problem with a place, before memory or time is spent.

/// MANIFEST's limits, and two that keep one document from costing more than all the others together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    pub file_bytes: u64,
    pub tree_bytes: u64,
    pub document_bytes: u64,
    pub depth: usize,
    pub aliases: usize,
    pub documents: usize,
    /// Values (keys included) in one document.
    pub values: usize,
    pub instances: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            file_bytes: 64 << 20,
            tree_bytes: 512 << 20,
            document_bytes: 16 << 20,
            depth: 64,
            aliases: 1_000,
            documents: 100_000,
            values: 1_200_000,
            instances: 1_000_000,
        }
    }
}
