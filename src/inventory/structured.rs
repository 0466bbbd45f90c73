//! JSON and YAML inventories: a list of hosts, or a map with `hosts`. The format is detected where no extension names it.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Unexpected, Visitor};

use super::rows::{Row, RowError, RowList, RowPlace, shown};
use super::{InventoryError, MAX_YAML_BYTES, csv};

/// Parses a text. `extension`: of its file.
pub fn parse(text: &str, extension: Option<&str>) -> Result<RowList, InventoryError> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    match extension.map(str::to_ascii_lowercase).as_deref() {
        Some("csv" | "tsv") => csv::parse(text),
        Some("json") => json(text),
        Some("yaml" | "yml") => yaml(text),
        _ => match text.trim_start().chars().next() {
            None => Err(InventoryError::Empty),
            Some('[' | '{') => json(text),
            Some(_) if is_csv(text) => csv::parse(text),
            Some(_) => yaml(text),
        },
    }
}

fn is_csv(text: &str) -> bool {
    let first = text.lines().map(str::trim).find(|line| !line.is_empty() && !line.starts_with('#'));
    first.is_some_and(|line| {
        !line.starts_with("- ") && !line.contains(':') && crate::import::is_hosts_header(line)
    })
}

fn json(text: &str) -> Result<RowList, InventoryError> {
    if text.trim().is_empty() {
        return Err(InventoryError::Empty);
    }
    let mut reader = serde_json::Deserializer::from_str(text);
    let rows = HostsSeed.deserialize(&mut reader).and_then(|rows| reader.end().map(|()| rows));
    rows.map_err(|error| InventoryError::Syntax(error.to_string()))
}

fn yaml(text: &str) -> Result<RowList, InventoryError> {
    // The parser needs many times the size of the text.
    if text.len() > MAX_YAML_BYTES {
        let message = format!("more than {} MiB of YAML: use JSON or CSV", MAX_YAML_BYTES >> 20);
        return Err(InventoryError::Syntax(message));
    }
    let rows = HostsSeed.deserialize(serde_yaml::Deserializer::from_str(text));
    rows.map_err(|error| InventoryError::Syntax(error.to_string()))
}

/// The hosts at the root of a document.
struct HostsSeed;

impl<'de> DeserializeSeed<'de> for HostsSeed {
    type Value = RowList;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<RowList, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for HostsSeed {
    type Value = RowList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of hosts, or a map with `hosts`")
    }

    /// The text may be a secret: the message does not contain it.
    fn visit_str<E: Error>(self, _: &str) -> Result<RowList, E> {
        Err(Error::invalid_type(Unexpected::Other("text"), &self))
    }

    fn visit_unit<E: Error>(self) -> Result<RowList, E> {
        Ok(RowList::default())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<RowList, A::Error> {
        let mut rows = RowList::default();
        let mut item = 1;
        while let Some(row) = items.next_element_seed(RowSeed)? {
            rows.push(RowPlace::Item(item), row).map_err(Error::custom)?;
            item += 1;
        }
        Ok(rows)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<RowList, A::Error> {
        let mut rows = None;
        while let Some(name) = entries.next_key::<String>()? {
            if name != "hosts" {
                return Err(Error::custom(format!("unknown field {:?}, expected `hosts`", shown(&name))));
            }
            if rows.replace(entries.next_value_seed(HostListSeed)?).is_some() {
                return Err(Error::custom("`hosts` occurs twice"));
            }
        }
        rows.ok_or_else(|| Error::custom("missing field `hosts`"))
    }
}

/// A list of hosts inside of `hosts`.
struct HostListSeed;

impl<'de> DeserializeSeed<'de> for HostListSeed {
    type Value = RowList;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<RowList, D::Error> {
        from.deserialize_seq(HostsSeed)
    }
}

/// One host: text, or a map.
struct RowSeed;

impl<'de> DeserializeSeed<'de> for RowSeed {
    type Value = Row;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Row, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for RowSeed {
    type Value = Row;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a host: an address, or a map such as {ip: 10.0.0.1, cloud: 0, labels: {set: eu}}")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Row, E> {
        Ok(Row { ip: Some(text.to_owned()), ..Row::default() })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Row, A::Error> {
        let mut row = Row::default();
        while let Some(name) = entries.next_key::<String>()? {
            match name.as_str() {
                "labels" => row.labels.extend(entries.next_value_seed(ScalarMap("label"))?),
                "vars" => row.vars.extend(entries.next_value_seed(ScalarMap("variable"))?),
                _ => {
                    let value = entries.next_value_seed(Scalar)?;
                    set(&mut row, name, value).map_err(Error::custom)?;
                }
            }
        }
        Ok(row)
    }
}

/// Sets a field of a host. Every other scalar is a label.
fn set(row: &mut Row, name: String, value: Option<String>) -> Result<(), RowError> {
    let Some(value) = value else { return Ok(()) };
    let number = |text: &str| text.parse::<u64>().map(Some).map_err(|_| RowError::not_a_number(&name, text));
    match name.as_str() {
        "ip" | "bk_host_innerip" => row.ip = Some(value),
        "cloud" | "bk_cloud_id" => row.cloud = number(&value)?,
        "supplier" | "bk_supplier_id" => row.supplier = number(&value)?,
        "agent" | "agent_id" | "bk_agent_id" => row.agent = Some(value),
        _ => drop(row.labels.insert(name, value)),
    }
    Ok(())
}

/// A text, a number or a bool as text; `None` for null.
struct Scalar;

impl<'de> DeserializeSeed<'de> for Scalar {
    type Value = Option<String>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Option<String>, D::Error> {
        from.deserialize_any(self)
    }
}

impl Visitor<'_> for Scalar {
    type Value = Option<String>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("text, a number, true or false")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Option<String>, E> {
        Ok(Some(text.to_owned()))
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Option<String>, E> {
        Ok(Some(value.to_string()))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Option<String>, E> {
        Ok(Some(value.to_string()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Option<String>, E> {
        Ok(Some(value.to_string()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Option<String>, E> {
        Ok(Some(value.to_string()))
    }

    fn visit_unit<E: Error>(self) -> Result<Option<String>, E> {
        Ok(None)
    }
}

/// A map of names to scalars.
struct ScalarMap(&'static str);

impl<'de> DeserializeSeed<'de> for ScalarMap {
    type Value = Vec<(String, String)>;

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<Self::Value, D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ScalarMap {
    type Value = Vec<(String, String)>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a map of {} names to text", self.0)
    }

    /// The text may be a secret: the message does not contain it.
    fn visit_str<E: Error>(self, _: &str) -> Result<Self::Value, E> {
        Err(Error::invalid_type(Unexpected::Other("text"), &self))
    }

    fn visit_unit<E: Error>(self) -> Result<Self::Value, E> {
        Ok(Vec::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(name) = entries.next_key::<String>()? {
            let value = entries.next_value_seed(Scalar)?;
            all.extend(value.map(|value| (name, value)));
        }
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, extension: Option<&str>) -> Vec<String> {
        let rows = parse(text, extension).unwrap_or_else(|error| panic!("{error}: {text}"));
        let (_, snapshot) = rows.into_snapshot().unwrap_or_else(|error| panic!("{error}: {text}"));
        snapshot.lines().skip(1).map(str::to_owned).collect()
    }

    fn error(text: &str) -> String {
        parse(text, None).expect_err("an error").to_string()
    }

    #[test]
    fn the_format_is_detected() {
        for text in [
            "[\"10.0.0.1\"]",
            "{\"hosts\": [{\"ip\": \"10.0.0.1\"}]}",
            "ip,rack\n10.0.0.1,a\n",
            "ip\n10.0.0.1",
            "- 10.0.0.1\n",
            "hosts:\n  - ip: 10.0.0.1\n    cloud: 0\n",
            "# ours\n- {ip: 10.0.0.1}\n",
        ] {
            let found = lines(text, None);
            assert!(
                found.len() == 1 && found[0].starts_with("{\"host\":\"0:10.0.0.1\""),
                "{text}: {found:?}"
            );
        }
        assert_eq!(lines("[10.0.0.1]", Some("yaml")).len(), 1);
    }

    #[test]
    fn other_scalars_are_labels_and_vars_are_text() {
        let text = "[{\"ip\": \"10.0.0.1\", \"cloud\": 3, \"set\": \"eu\", \"slot\": 7, \"gone\": null,
                      \"labels\": {\"tier\": \"x\"}, \"vars\": {\"port\": 8080, \"debug\": true}}]";
        let labels = "\"labels\":{\"set\":\"eu\",\"slot\":\"7\",\"tier\":\"x\"}";
        let vars = "\"vars\":{\"debug\":\"true\",\"port\":\"8080\"}";
        assert_eq!(lines(text, None), [format!("{{\"host\":\"3:10.0.0.1\",{labels},{vars}}}")]);
    }

    #[test]
    fn wrong_types_have_places() {
        let of_list = error("[\n {\"ip\": [1]}\n]");
        assert!(of_list.contains("expected text, a number, true or false at line 2"), "{of_list}");
        assert!(error("[17]").contains("expected a host"), "{}", error("[17]"));
        assert!(error("{\"host\": []}").contains("unknown field \"host\", expected `hosts`"));
        assert!(
            error("{\"hosts\": {}}").contains("expected a list of hosts"),
            "{}",
            error("{\"hosts\": {}}")
        );
        assert!(
            error("[{\"ip\": \"10.0.0.1\", \"cloud\": \"x\"}]").contains("the cloud \"x\" is not a number")
        );
        assert!(error("[{\"ip\": \"10.0.0.1\"} x").contains("line 1 column"));
        let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(error(&deep).contains("expected a host"));
        assert!(matches!(parse("", None), Err(InventoryError::Empty)));
    }
}
