//! Abide: processes that abide by git.
//!
//! People commit manifests; Abide compares them with what is registered and running, and issues the fewest
//! operations that make the two equal. This page is the map; each room's own page says more.
//!
//! # A manifest's journey
//! ```text
//! web.yaml ─find→ text ─read→ Document ─check→ declaration ─expand→ Desired
//! ```
//! From there a plan will be made and carried out; those rooms are not built yet.
//!
//! # The rooms
//! - [`model`]: the nouns: keys, spec, desired state, revision. Plain data, knows nobody.
//! - [`manifest`]: text → [`Desired`](model::Desired), and every problem with its place.
//! - [`reconcile`]: the pure core. So far the effect table (what a change of each field does), the difference of two
//!   specs, and the fewest operations for one instance.
//! - [`gse`]: the wire of GSE and JOB. So far the bodies that declare a process.
//! - [`cli`]: one file a verb; the only place that prints. Nobody knows it.
//!
//! # What always holds
//! - `model` and `reconcile` see only std, serde and blake3: no I/O, no clock.
//! - Unset stays unset: nothing is said to anybody that the user, a Defaults or a documented default did not say.
//! - No input makes it panic: a bad file is a problem with a place, and spoils no other file.
//! - The same files give the same bytes, in whatever order they are found.

pub mod backend;
pub mod cli;
pub mod clock;
pub mod gse;
pub mod manifest;
pub mod model;
pub mod reconcile;
