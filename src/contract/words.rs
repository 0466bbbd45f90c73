//! Texts and words of the model in JSON: keys, revisions, and words of enums, with their schemas.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::model::{
    Health, HoldReason, HostKey, InstanceKey, Name, Op, ProcessKey, Rule, SpecRevision, SpecSide,
    StepOutcome, SyncStatus,
};

/// A type that is a text in JSON.
macro_rules! text {
    ($($type:ident: $about:literal;)*) => {$(
        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": "string", "description": $about})
            }
        }
    )*};
}

text! {
    InstanceKey: "CLOUD:IP:NAMESPACE:NAME or @AGENT_ID:NAMESPACE:NAME";
    HostKey: "CLOUD:IP or @AGENT_ID";
    ProcessKey: "NAMESPACE/NAME";
    Name: "a namespace, or the name of a process";
    SpecRevision: "the digests of a spec, one per effect";
}

/// The schema of a type that is one of a list of words.
fn words_schema(words: impl Iterator<Item = &'static str>) -> Schema {
    json_schema!({"type": "string", "enum": words.collect::<Vec<_>>()})
}

impl JsonSchema for Op {
    fn schema_name() -> Cow<'static, str> {
        "Op".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        words_schema(Op::ALL.into_iter().map(Op::word))
    }
}

/// An enum whose words are stable.
macro_rules! words {
    ($($type:ident)*) => {$(
        impl Serialize for $type {
            fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
                to.serialize_str(self.word())
            }
        }

        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                let word = String::deserialize(from)?;
                let known = $type::ALL.into_iter().find(|known| known.word() == word);
                known.ok_or_else(|| serde::de::Error::custom(format!("unknown word {word:?}")))
            }
        }

        impl JsonSchema for $type {
            fn schema_name() -> Cow<'static, str> {
                stringify!($type).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                words_schema($type::ALL.into_iter().map($type::word))
            }
        }
    )*};
}

words! { Health HoldReason Rule SpecSide StepOutcome SyncStatus }
