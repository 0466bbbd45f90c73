//! Abide: processes that abide by git.
//!
//! # The rooms
//! - [`model`]: the nouns: keys, spec, desired state, revision. Plain data, knows nobody.
//! - [`manifest`]: text → [`Desired`](model::Desired), and every problem with its place.
//! - [`reconcile`]: the pure core. So far the effect table: what a change of each field does.

pub mod manifest;
pub mod model;
pub mod reconcile;
