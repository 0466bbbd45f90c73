//! Size limits of a manifest tree. Input beyond a limit is reported as a problem before memory or time is spent.

/// Limits on files, documents and instances.
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
