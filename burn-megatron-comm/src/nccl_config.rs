//! The settings of the `nccl` engine. They do not change results, except for the order in which NCCL sums.

use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

/// The maximum number of CTAs of a communicator in NCCL up to version 2.30. The number is `MAXCHANNELS` in the NCCL
/// sources, which was 32 before version 2.23.
pub const MAX_CTAS: u32 = 64;

/// The settings of the `nccl` engine. See [`World::nccl`](crate::World::nccl).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NcclConfig {
    /// Whether the NCCL communicator of a group is created as soon as the group is created, by splitting the
    /// communicator of the parent group. All ranks of the parent group must take part. By default, the members of a
    /// group create its communicator at their first collective.
    pub eager_init: bool,
    /// The kind of memory that is registered with NCCL for collectives on large tensors. By default, no memory is
    /// registered.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("experimental" = true))]
    pub registered_buffers: Option<RegisteredBuffers>,
    /// The settings of NCCL communicators for each kind of group.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "groups_schema")]
    pub groups: BTreeMap<NcclGroup, NcclGroupConfig>,
}

/// Builds the schema of a table that has a key for each kind of group.
fn groups_schema(generator: &mut SchemaGenerator) -> Schema {
    let group = generator.subschema_for::<NcclGroupConfig>();
    let groups: BTreeMap<_, _> = NcclGroup::ALL
        .map(|name| (name.to_string(), group.clone()))
        .into();
    json_schema!({"type": "object", "properties": groups, "additionalProperties": false})
}

/// The kind of memory that is registered with NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum RegisteredBuffers {
    /// The allocations that contain the tensors (`ncclCommRegister`). Tensors are not copied.
    Allocations,
    /// Symmetric windows (`ncclCommWindowRegister`), whose memory is allocated by NCCL. Tensors are copied into the
    /// window and back.
    Windows,
}

/// A kind of process group, whose communicators share settings.
#[derive(
    Clone,
    Copy,
    Debug,
    PartialEq,
    Eq,
    Hash,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    strum::Display,
    strum::IntoStaticStr,
    strum::VariantArray,
)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum NcclGroup {
    /// The groups over the tensor axis, possibly with other axes, but without the data axis.
    Tensor,
    /// The groups over the context axis without the tensor and data axes.
    Context,
    /// The groups of the expert grid that do not include the data axis.
    Expert,
    /// The groups that include the data axis, in both grids.
    Data,
    /// The pipeline-parallel groups.
    Pipeline,
    /// All other groups, such as the group of all ranks.
    World,
    /// The point-to-point messages of all groups. Each direction between two ranks has its own communicator.
    Messages,
}

/// The settings of the communicators of one [`NcclGroup`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct NcclGroupConfig {
    /// The minimum number of CTAs of a collective, from 1 to [64](MAX_CTAS). By default, NCCL chooses the number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_ctas: Option<u32>,
    /// The maximum number of CTAs of a collective, from 1 to [64](MAX_CTAS). By default, NCCL chooses the number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_ctas: Option<u32>,
    /// Whether collectives run on a high-priority stream, concurrently with the collectives on the stream of normal
    /// priority. By default, the collectives of tensor and expert groups run on the high-priority stream if this cannot
    /// cause a deadlock. If the setting could cause a deadlock, the engine does not start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub high_priority_stream: Option<bool>,
}

/// An invalid NCCL setting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NcclConfigError {
    /// The number of CTAs is out of range.
    #[error("invalid nccl.groups.{group}.{key} = {value}: expected 1 to {MAX_CTAS}")]
    Ctas {
        /// The kind of group.
        group: NcclGroup,
        /// The name of the setting, `min_ctas` or `max_ctas`.
        key: &'static str,
        /// The invalid number.
        value: u32,
    },
    /// The minimum number of CTAs is greater than the maximum number.
    #[error(
        "nccl.groups.{group}.min_ctas = {min} is above max_ctas = {max}: expected at most {max}"
    )]
    MinAboveMax {
        /// The kind of group.
        group: NcclGroup,
        /// The minimum number of CTAs.
        min: u32,
        /// The maximum number of CTAs.
        max: u32,
    },
}

impl NcclConfig {
    /// Returns whether all settings have their default values.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the settings of a kind of group.
    pub fn group(&self, group: NcclGroup) -> NcclGroupConfig {
        self.groups.get(&group).copied().unwrap_or_default()
    }

    /// Checks the numbers of CTAs.
    ///
    /// # Errors
    ///
    /// [`NcclConfigError`] for the first invalid number.
    pub fn check(&self) -> Result<(), NcclConfigError> {
        for (group, config) in &self.groups {
            config.check(*group)?;
        }
        Ok(())
    }
}

impl NcclGroupConfig {
    fn check(self, group: NcclGroup) -> Result<(), NcclConfigError> {
        for (key, value) in [("min_ctas", self.min_ctas), ("max_ctas", self.max_ctas)] {
            if let Some(value) = value.filter(|value| !(1..=MAX_CTAS).contains(value)) {
                return Err(NcclConfigError::Ctas { group, key, value });
            }
        }
        match (self.min_ctas, self.max_ctas) {
            (Some(min), Some(max)) if min > max => {
                Err(NcclConfigError::MinAboveMax { group, min, max })
            }
            _ => Ok(()),
        }
    }
}

impl NcclGroup {
    /// The list of all kinds of groups.
    pub const ALL: [Self; 7] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the name that is used in recipes.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the kind of the group whose communicator has the name `name`.
    /// [`ParallelContext`](crate::ParallelContext) builds these names from the axes.
    #[cfg(any(test, feature = "cuda"))]
    pub(crate) fn of_name(name: &str) -> Self {
        let words = || name.split(|c: char| !c.is_alphanumeric() && c != '-');
        let has = |axis: &str| words().any(|word| word == axis);
        if has("data") || has("shard") || has("replicas") {
            Self::Data
        } else if has("expert") {
            Self::Expert
        } else if has("tensor") {
            Self::Tensor
        } else if has("context") {
            Self::Context
        } else if has("pipeline") {
            Self::Pipeline
        } else {
            Self::World
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_known_by_their_axes() {
        for (name, group) in [
            ("tensor", NcclGroup::Tensor),
            ("tensor/2", NcclGroup::Tensor),
            ("tensor x context", NcclGroup::Tensor),
            ("context: neighbours", NcclGroup::Context),
            ("context x data", NcclGroup::Data),
            ("context x data between nodes", NcclGroup::Data),
            ("shard", NcclGroup::Data),
            ("expert: expert", NcclGroup::Expert),
            ("expert: expert-tensor in a node", NcclGroup::Expert),
            ("expert: data", NcclGroup::Data),
            ("pipeline", NcclGroup::Pipeline),
            ("embedding", NcclGroup::World),
            ("stage", NcclGroup::World),
        ] {
            assert_eq!(NcclGroup::of_name(name), group, "{name}");
        }
    }

    #[test]
    fn numbers_are_checked() {
        for (text, part) in [
            (
                "data = { max_ctas = 65 }",
                "nccl.groups.data.max_ctas = 65: expected 1 to 64",
            ),
            (
                "data = { min_ctas = 0 }",
                "nccl.groups.data.min_ctas = 0: expected 1 to 64",
            ),
            (
                "data = { min_ctas = 9, max_ctas = 8 }",
                "expected at most 8",
            ),
        ] {
            let config: NcclConfig = toml::from_str(&format!("[groups]\n{text}")).unwrap();
            let error = config.check().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn a_recipe_has_them_as_a_table() {
        let text = "eager_init = true\nregistered_buffers = \"windows\"\n\n[groups.tensor]\nmax_ctas = 16\n\
                    high_priority_stream = true\n";
        let config: NcclConfig = toml::from_str(text).unwrap();
        assert_eq!(config.group(NcclGroup::Tensor).max_ctas, Some(16));
        assert_eq!(toml::to_string(&config).unwrap(), text);
        assert!(!config.is_default() && NcclConfig::default().is_default());
    }
}
