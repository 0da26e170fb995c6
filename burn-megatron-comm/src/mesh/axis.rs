//! The axes of a device mesh, and the order in which the axes number the ranks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

use super::MeshError;
use super::as_text::serde_as_text;

/// A kind of parallelism, which is one axis of the device mesh.
///
/// Messages and files use the full name (`tensor`, `expert-tensor`). An [`AxisOrder`] uses the abbreviation (`tp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Axis {
    /// Tensor parallelism: each rank holds a shard of every weight matrix.
    Tensor,
    /// Context parallelism: each rank holds a part of every sequence.
    Context,
    /// Expert parallelism: each rank holds some of the experts.
    Expert,
    /// Tensor parallelism inside the experts: each rank holds a shard of the weight matrices of every expert.
    ExpertTensor,
    /// Data parallelism: each rank holds a replica of its part of the model and reads different samples.
    Data,
    /// Pipeline parallelism: each rank holds some of the layers.
    Pipeline,
}

impl Axis {
    /// The list of all axes.
    pub const ALL: [Axis; 6] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the full name of the axis, which is used in [`Display`](fmt::Display) and in files.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// Returns the usual abbreviation: `tp`, `cp`, `ep`, `etp`, `dp` or `pp`.
    pub const fn abbreviation(self) -> &'static str {
        match self {
            Axis::Tensor => "tp",
            Axis::Context => "cp",
            Axis::Expert => "ep",
            Axis::ExpertTensor => "etp",
            Axis::Data => "dp",
            Axis::Pipeline => "pp",
        }
    }
}

/// The order in which the axes number the ranks. The leftmost axis varies fastest.
///
/// The default order is written `tp-cp-ep-dp-pp`. An order never contains `etp`: in the expert grid, `tp` stands for
/// the expert-tensor axis. An axis of size 1 may be omitted.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AxisOrder(Vec<Axis>);

impl AxisOrder {
    const ORDERED: [Axis; 5] = [
        Axis::Tensor,
        Axis::Context,
        Axis::Expert,
        Axis::Data,
        Axis::Pipeline,
    ];

    /// Returns the axes in this order. The first axis has stride 1.
    pub fn axes(&self) -> &[Axis] {
        &self.0
    }

    /// Returns this order with the missing axes appended.
    pub(super) fn completed(&self) -> AxisOrder {
        let left_out = Self::ORDERED
            .into_iter()
            .filter(|axis| !self.0.contains(axis));
        AxisOrder(self.0.iter().copied().chain(left_out).collect())
    }

    /// Returns whether this is the default order.
    pub(super) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the completed order with the pipeline moved to the end.
    pub(super) fn pipeline_last(&self) -> AxisOrder {
        let mut axes = self.completed().0;
        axes.retain(|axis| *axis != Axis::Pipeline);
        axes.push(Axis::Pipeline);
        AxisOrder(axes)
    }
}

impl Default for AxisOrder {
    fn default() -> Self {
        AxisOrder(Self::ORDERED.to_vec())
    }
}

impl FromStr for AxisOrder {
    type Err = MeshError;

    fn from_str(order: &str) -> Result<Self, MeshError> {
        let mut axes = Vec::new();
        for name in order.split('-') {
            let axis = Self::ORDERED
                .into_iter()
                .find(|axis| axis.abbreviation() == name)
                .ok_or_else(|| MeshError::UnknownAxis {
                    name: name.into(),
                    order: order.into(),
                })?;
            if axes.contains(&axis) {
                return Err(MeshError::DuplicateAxis {
                    axis,
                    order: order.into(),
                });
            }
            axes.push(axis);
        }
        Ok(AxisOrder(axes))
    }
}

impl fmt::Display for AxisOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<_> = self.0.iter().map(|axis| axis.abbreviation()).collect();
        f.pad(&names.join("-"))
    }
}

serde_as_text!(AxisOrder);
