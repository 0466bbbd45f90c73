//! Schemas of an OpenAPI document, derived from types: requests as they are parsed, responses as they are written.

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, SchemaGenerator};
use serde_json::{Map, Value, json};

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

    /// An OpenAPI document of these schemas. `security`: the alternatives of a call, by names of `schemes`.
    pub fn document(
        self,
        (title, description): (&str, &str),
        security: Value,
        schemes: Value,
        paths: Map<String, Value>,
    ) -> Value {
        json!({
            "openapi": "3.1.0",
            "info": {"title": title, "version": env!("CARGO_PKG_VERSION"), "description": description},
            "security": security,
            "paths": paths,
            "components": {"securitySchemes": schemes, "schemas": self.definitions()},
        })
    }

    /// Every schema that a request or response refers to, by name.
    fn definitions(mut self) -> Map<String, Value> {
        let mut all = self.responses.take_definitions(true);
        // Where a type is in both, a request may omit fields that a response always has.
        all.extend(self.requests.take_definitions(true));
        all.sort_keys();
        all
    }
}
