//! Join tokens and certificates of a gateway's agents.

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{Abide, BackendError, TIME, read};
use crate::contract::{
    CreatedJoinToken, HostRevocation, JoinTokenRequest, JoinTokenRow, Revoked, TokenRevocation,
};

impl Abide {
    pub async fn create_join_token(
        &self,
        request: &JoinTokenRequest,
    ) -> Result<CreatedJoinToken, BackendError> {
        self.administer("/api/abide/v1/tokens", serde_json::to_value(request)).await
    }

    pub async fn join_tokens(&self) -> Result<Vec<JoinTokenRow>, BackendError> {
        read(&self.get("/api/abide/v1/tokens").await?)
    }

    pub async fn revoke_join_token(&self, id: &str) -> Result<Revoked, BackendError> {
        let request = serde_json::to_value(TokenRevocation { id: id.to_owned() });
        self.administer("/api/abide/v1/tokens/revoke", request).await
    }

    pub async fn revoke_host(&self, request: &HostRevocation) -> Result<Revoked, BackendError> {
        self.administer("/api/abide/v1/hosts/revoke", serde_json::to_value(request)).await
    }

    async fn administer<T: DeserializeOwned>(
        &self,
        path: &str,
        body: Result<Value, serde_json::Error>,
    ) -> Result<T, BackendError> {
        let body = body.unwrap_or_default().to_string().into_bytes();
        let answer = self.calls.call(reqwest::Method::POST, path, body, &[], TIME).await?;
        serde_json::from_str(&answer)
            .map_err(|error| BackendError::invalid_response(format!("invalid response: {error}")))
    }
}
