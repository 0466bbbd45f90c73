//! Value types of documents: text, numbers, and values with a short and a long form.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use super::{EnvSource, HealthEntry, HookEntry, HostEntry, RestartEntry};

/// Text only: a plain `String` would accept YAML's `null`, `1.10` and `true`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct Text(pub String);

impl std::ops::Deref for Text {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Text {
    fn from(text: &str) -> Self {
        Text(text.to_owned())
    }
}

struct TextVisitor;

impl Visitor<'_> for TextVisitor {
    type Value = Text;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Text, E> {
        Ok(Text(text.to_owned()))
    }

    fn visit_string<E: Error>(self, text: String) -> Result<Text, E> {
        Ok(Text(text))
    }
}

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(TextVisitor)
    }
}

/// A number. (The YAML crate reads `010` as a float here, and as text elsewhere.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Real(pub f64);

struct RealVisitor;

impl Visitor<'_> for RealVisitor {
    type Value = Real;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a number")
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<Real, E> {
        Ok(Real(x))
    }

    fn visit_i64<E: Error>(self, n: i64) -> Result<Real, E> {
        Ok(Real(n as f64))
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<Real, E> {
        Ok(Real(n as f64))
    }
}

impl<'de> Deserialize<'de> for Real {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(RealVisitor)
    }
}

/// Text, or a whole number in place of text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum TextOrNumber {
    Text(String),
    Number(i64),
}

impl fmt::Display for TextOrNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextOrNumber::Text(text) => f.write_str(text),
            TextOrNumber::Number(n) => write!(f, "{n}"),
        }
    }
}

/// A value of `env`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum EnvEntry {
    Plain(TextOrNumber),
    Source(EnvSource),
}

/// A health check: a URL or command as text, or a map.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum HealthValue {
    Probe(String),
    Check(HealthEntry),
}

/// A restart policy: its word, or a map.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum RestartValue {
    Policy(String),
    Map(RestartEntry),
}

/// A hook: its command, or a map.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum HookValue {
    Run(String),
    Map(HookEntry),
}

/// The base of an overlay: one path, or several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BaseValue {
    One(Text),
    Many(Vec<Text>),
}

impl BaseValue {
    pub fn paths(&self) -> &[Text] {
        match self {
            BaseValue::One(path) => std::slice::from_ref(path),
            BaseValue::Many(paths) => paths,
        }
    }
}

/// The fields of a patch, as in a Process. A null removes a field.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct PatchFields(pub serde_yaml::Mapping);

/// protect_system: true, or a word.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum ProtectValue {
    Switch(bool),
    Word(String),
}

/// Labels of a host in a HostGroup, or a selector on a group's hosts in a Process.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum HostLabels {
    Selector(String),
    Have(Map<TextOrNumber>),
}

/// The value of a variable.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Scalar {
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scalar::Text(text) => f.write_str(text),
            Scalar::Int(n) => write!(f, "{n}"),
            Scalar::Float(x) => write!(f, "{x}"),
            Scalar::Bool(value) => write!(f, "{value}"),
        }
    }
}

struct ScalarVisitor;

impl Visitor<'_> for ScalarVisitor {
    type Value = Scalar;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text, a number, or true or false")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Scalar, E> {
        Ok(Scalar::Text(text.to_owned()))
    }

    fn visit_i64<E: Error>(self, n: i64) -> Result<Scalar, E> {
        Ok(Scalar::Int(n))
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<Scalar, E> {
        match i64::try_from(n) {
            Ok(n) => Ok(Scalar::Int(n)),
            Err(_) => Err(E::invalid_value(Unexpected::Unsigned(n), &self)),
        }
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<Scalar, E> {
        match x == 0.0 && x.is_sign_negative() {
            true => Ok(Scalar::Int(0)),
            false => Ok(Scalar::Float(x)),
        }
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Scalar, E> {
        Ok(Scalar::Bool(value))
    }
}

impl<'de> Deserialize<'de> for Scalar {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(ScalarVisitor)
    }
}

/// An entry of `hosts`: an address as text, or a map.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum HostValue {
    Address(String),
    Entry(HostEntry),
}

impl HostValue {
    /// The entry of a map.
    pub fn entry(&self) -> Option<&HostEntry> {
        match self {
            HostValue::Entry(entry) => Some(entry),
            HostValue::Address(_) => None,
        }
    }
}

/// Visitor for values that may be text, a number or a map.
struct EitherVisitor<T>(PhantomData<T>);

trait FromEither: Sized {
    const EXPECTING: &'static str;
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Err(Unexpected::Str(text))
    }
    fn number(n: i64) -> Result<Self, Unexpected<'static>> {
        Err(Unexpected::Signed(n))
    }
    fn bool(value: bool) -> Result<Self, Unexpected<'static>> {
        Err(Unexpected::Bool(value))
    }
    fn map<'de, A: MapAccess<'de>>(_: A) -> Result<Self, A::Error> {
        Err(A::Error::invalid_type(Unexpected::Map, &Self::EXPECTING))
    }
}

impl<'de, T: FromEither> Visitor<'de> for EitherVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(T::EXPECTING)
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<T, E> {
        T::text(text).map_err(|found| E::invalid_type(found, &T::EXPECTING))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<T, E> {
        T::bool(value).map_err(|found| E::invalid_type(found, &T::EXPECTING))
    }

    fn visit_i64<E: Error>(self, n: i64) -> Result<T, E> {
        T::number(n).map_err(|found| E::invalid_type(found, &T::EXPECTING))
    }

    fn visit_u64<E: Error>(self, n: u64) -> Result<T, E> {
        match i64::try_from(n) {
            Ok(n) => self.visit_i64(n),
            Err(_) => Err(E::invalid_value(Unexpected::Unsigned(n), &T::EXPECTING)),
        }
    }

    fn visit_f64<E: Error>(self, x: f64) -> Result<T, E> {
        // serde_json parses -0 as a float; the grammar treats it as a whole number.
        if x == 0.0 && x.is_sign_negative() {
            self.visit_i64(0)
        } else {
            Err(E::invalid_type(Unexpected::Float(x), &T::EXPECTING))
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        T::map(map)
    }
}

impl FromEither for TextOrNumber {
    const EXPECTING: &'static str = "text";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(TextOrNumber::Text(text.to_owned()))
    }
    fn number(n: i64) -> Result<Self, Unexpected<'static>> {
        Ok(TextOrNumber::Number(n))
    }
}

impl FromEither for EnvEntry {
    const EXPECTING: &'static str = "text, or a map with file, exec, or value and secret";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(EnvEntry::Plain(TextOrNumber::Text(text.to_owned())))
    }
    fn number(n: i64) -> Result<Self, Unexpected<'static>> {
        Ok(EnvEntry::Plain(TextOrNumber::Number(n)))
    }
    fn map<'de, A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        EnvSource::deserialize(MapAccessDeserializer::new(map)).map(EnvEntry::Source)
    }
}

impl FromEither for HostLabels {
    const EXPECTING: &'static str = "a selector as text, or a map of labels";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(HostLabels::Selector(text.to_owned()))
    }
    fn map<'de, A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        MapVisitor(PhantomData).visit_map(map).map(HostLabels::Have)
    }
}

impl FromEither for HostValue {
    const EXPECTING: &'static str = "an address as text, or a map with ip, bk_agent_id or group";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(HostValue::Address(text.to_owned()))
    }
    fn map<'de, A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        HostEntry::deserialize(MapAccessDeserializer::new(map)).map(HostValue::Entry)
    }
}

impl FromEither for HealthValue {
    const EXPECTING: &'static str = "a URL or command as text, or a map with cmd, http or tcp";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(HealthValue::Probe(text.to_owned()))
    }
    fn map<'de, A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        HealthEntry::deserialize(MapAccessDeserializer::new(map)).map(HealthValue::Check)
    }
}

impl FromEither for RestartValue {
    const EXPECTING: &'static str = "always, on-failure or never, or a map with policy";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(RestartValue::Policy(text.to_owned()))
    }
    fn map<'de, A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        RestartEntry::deserialize(MapAccessDeserializer::new(map)).map(RestartValue::Map)
    }
}

impl FromEither for HookValue {
    const EXPECTING: &'static str = "a command, or a map with run";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(HookValue::Run(text.to_owned()))
    }
    fn map<'de, A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        HookEntry::deserialize(MapAccessDeserializer::new(map)).map(HookValue::Map)
    }
}

impl FromEither for ProtectValue {
    const EXPECTING: &'static str = "true, full or strict";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(ProtectValue::Word(text.to_owned()))
    }
    fn bool(value: bool) -> Result<Self, Unexpected<'static>> {
        Ok(ProtectValue::Switch(value))
    }
}

macro_rules! read_either {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_any(EitherVisitor(PhantomData))
            }
        }
    )*};
}
read_either!(
    TextOrNumber,
    EnvEntry,
    HostLabels,
    HostValue,
    HealthValue,
    RestartValue,
    HookValue,
    ProtectValue
);

/// A map with user-defined keys. Duplicate keys are rejected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct Map<V>(pub BTreeMap<String, V>);

impl<V> Default for Map<V> {
    fn default() -> Self {
        Map(BTreeMap::new())
    }
}

struct MapVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for MapVisitor<V> {
    type Value = Map<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Map<V>, A::Error> {
        let mut entries = BTreeMap::new();
        while let Some((Text(key), value)) = map.next_entry::<Text, V>()? {
            if entries.contains_key(&key) {
                return Err(A::Error::custom(format_args!("duplicate key {key:?}")));
            }
            entries.insert(key, value);
        }
        Ok(Map(entries))
    }
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Map<V> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_map(MapVisitor(PhantomData))
    }
}
