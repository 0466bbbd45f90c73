//! Document structs for serde: manifests as written, before any check.
//!
//! One struct has the optional fields of every kind, so that serde parses in one pass without buffering. `check` reports
//! missing fields, fields of another kind and values out of range. An input that serde rejects (unknown field, wrong
//! type, duplicate key) goes to `structure`, which finds and locates all such problems of the document.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

/// Derives strict deserialization, and serialization of the fields that are set.
macro_rules! written {
    ($($(#[$meta:meta])* $name:ident { $($(#[$attr:meta])* $field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct $name {
            $($(#[$attr])* #[serde(skip_serializing_if = "Option::is_none")] pub $field: Option<$type>),*
        }
    )*};
}

written! {
    Document {
        #[serde(rename = "apiVersion")] api_version: Text,
        kind: Text,
        meta: Meta,
        hosts: Vec<HostEntry>,
        state: Text,
        instances: i64,
        depends_on: Vec<Text>,
        protect: Vec<Text>,
        adopt: bool,
        moved_from: Text,
        on_change: Map<Text>,
        rollout: RolloutEntry,
        spec: SpecEntry,
        // Policy
        owner: Text,
        allow: AllowEntry,
        budgets: BudgetsEntry,
        windows: Vec<WindowEntry>,
        // Fields of a pasted request: accepted and ignored.
        op_type: i64,
        bk_app_code: Text,
        bk_app_secret: Text,
        bk_token: Text,
        bk_username: Text,
    }
    Meta { namespace: Text, name: Text, labels: Map<TextOrNumber> }
    HostEntry {
        ip: Text,
        bk_cloud_id: i64,
        bk_supplier_id: i64,
        bk_agent_id: Text,
        group: Text,
        labels: HostLabels,
    }
    RolloutEntry {
        batch: TextOrNumber,
        canary: TextOrNumber,
        soak: TextOrNumber,
        max_failures: i64,
        auto_rollback: bool,
    }
    SpecEntry {
        identity: IdentityEntry,
        control: ControlEntry,
        resource: ResourceEntry,
        #[serde(alias = "alive_monitor_policy")] monitor_policy: MonitorEntry,
        warn_report_policy: WarnEntry,
        configmap: Vec<ConfigEntry>,
        env: Map<EnvEntry>,
        job: JobEntry,
    }
    IdentityEntry {
        proc_name: Text,
        setup_path: Text,
        pid_path: Text,
        config_path: Text,
        log_path: Text,
        user: Text,
        #[serde(alias = "index_key")] value_key: Text,
    }
    ControlEntry {
        start_cmd: Text,
        stop_cmd: Text,
        restart_cmd: Text,
        reload_cmd: Text,
        kill_cmd: Text,
        version_cmd: Text,
        health_cmd: Text,
        start_mode: Text,
    }
    ResourceEntry { cpu: Real, mem: Real, fd: i64, disk: i64, net: i64 }
    MonitorEntry {
        auto_type: i64,
        start_check_secs: i64,
        stop_check_secs: i64,
        start_retries: i64,
        start_interval: i64,
        #[serde(alias = "crotab_rule")] crontab_rule: Text,
        op_timeout: i64,
    }
    WarnEntry { report_id: i64 }
    ConfigEntry { path: Text, md5: Text }
    JobEntry {
        proc_owner: Text,
        func_id: Text,
        instance_id: Text,
        instance_num: i64,
        cycle_time: i64,
        start_check_begin_time: i64,
        start_check_end_time: i64,
    }
    AllowEntry { namespaces: Vec<Text>, users: Vec<Text>, hosts: Vec<Text> }
    BudgetsEntry { delete: TextOrNumber, restart: TextOrNumber }
    WindowEntry {
        days: Text,
        from: Text,
        to: Text,
        tz: Text,
        #[serde(rename = "for")] operations: Vec<Text>,
    }
    /// The long form of an environment value.
    EnvSource { file: Text, value: TextOrNumber, secret: bool }
}

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

/// Labels of a host in a HostGroup, or a selector on a group's hosts in a Process.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum HostLabels {
    Selector(String),
    Have(Map<TextOrNumber>),
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
    const EXPECTING: &'static str = "text, or a map with file, or with value and secret";
    fn text(text: &str) -> Result<Self, Unexpected<'_>> {
        Ok(EnvEntry::Plain(TextOrNumber::Text(text.to_owned())))
    }
    fn number(n: i64) -> Result<Self, Unexpected<'static>> {
        Ok(EnvEntry::Plain(TextOrNumber::Number(n)))
    }
    fn map<'de, A: MapAccess<'de>>(map: A) -> Result<Self, A::Error> {
        EnvSource::deserialize(serde::de::value::MapAccessDeserializer::new(map)).map(EnvEntry::Source)
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

macro_rules! read_either {
    ($($type:ty),*) => {$(
        impl<'de> Deserialize<'de> for $type {
            fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
                from.deserialize_any(EitherVisitor(PhantomData))
            }
        }
    )*};
}
read_either!(TextOrNumber, EnvEntry, HostLabels);

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

/// Fills unset fields from `under`. Maps merge by key; lists and single values are replaced.
pub trait Overlay {
    fn fill_from(&mut self, under: &Self);
}

macro_rules! overlay {
    ($($name:ident { $($inner:ident),* ; $($leaf:ident),* })*) => {$(
        impl Overlay for $name {
            fn fill_from(&mut self, under: &Self) {
                // Destructured without `..`: a new field does not compile until it is listed.
                let $name { $($inner,)* $($leaf),* } = under;
                $(if let Some(under) = $inner {
                    match &mut self.$inner {
                        Some(own) => own.fill_from(under),
                        own => *own = Some(under.clone()),
                    }
                })*
                $(if self.$leaf.is_none() {
                    self.$leaf.clone_from($leaf);
                })*
            }
        }
    )*};
}

overlay! {
    SpecEntry { identity, control, resource, monitor_policy, warn_report_policy, env, job; configmap }
    IdentityEntry { ; proc_name, setup_path, pid_path, config_path, log_path, user, value_key }
    ControlEntry {
        ; start_cmd, stop_cmd, restart_cmd, reload_cmd, kill_cmd, version_cmd, health_cmd, start_mode
    }
    ResourceEntry { ; cpu, mem, fd, disk, net }
    MonitorEntry {
        ; auto_type, start_check_secs, stop_check_secs, start_retries, start_interval, crontab_rule, op_timeout
    }
    WarnEntry { ; report_id }
    JobEntry {
        ; proc_owner, func_id, instance_id, instance_num, cycle_time, start_check_begin_time, start_check_end_time
    }
}

impl<V: Clone> Overlay for Map<V> {
    fn fill_from(&mut self, under: &Self) {
        for (key, value) in &under.0 {
            self.0.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
}
