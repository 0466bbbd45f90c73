//! The pure core. So far: what a change of each field of a spec asks for, and the digests made of it.

pub mod effect;

pub use effect::{effect_of, revision, table};
