//! Schemas of an OpenAPI document, derived from types: requests as they are parsed, responses as they are written.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value};

/// The named schemas of one document.
pub struct SchemaSet {
    requests: SchemaGenerator,
    responses: SchemaGenerator,
}

impl SchemaSet {
    #[expect(clippy::new_without_default, reason = "a set is built once per document")]
    pub fn new() -> SchemaSet {
        // OpenAPI 3.1 uses this draft.
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = "/components/schemas".into();
            settings.meta_schema = None;
        });
        SchemaSet {
            requests: settings.clone().for_deserialize().into_generator(),
            responses: settings.for_serialize().into_generator(),
        }
    }

    /// Reference to the schema of a request body.
    pub fn request<T: JsonSchema>(&mut self) -> Value {
        self.requests.subschema_for::<T>().into()
    }

    /// Reference to the schema of a response.
    pub fn response<T: JsonSchema>(&mut self) -> Value {
        self.responses.subschema_for::<T>().into()
    }

    /// Every schema that a request or response refers to, by name.
    pub fn definitions(mut self) -> Map<String, Value> {
        let mut all = self.responses.take_definitions(true);
        // Where a type is in both, a request may omit fields that a response always has.
        all.extend(self.requests.take_definitions(true));
        all.sort_keys();
        all
    }
}
