//! The axes of a mesh and the order in which they number ranks.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use strum::VariantArray as _;

use super::MeshError;
use super::as_text::serde_as_text;

/// A kind of parallelism.
///
/// Messages and files use the full name (`tensor`, `expert-tensor`). An [`AxisOrder`] uses the abbreviation (`tp`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[derive(strum::Display, strum::IntoStaticStr, strum::VariantArray)]
#[strum(serialize_all = "kebab-case")]
pub enum Axis {
    /// Each rank holds a slice of every weight matrix.
    Tensor,
    /// Each rank holds a slice of every sequence.
    Context,
    /// Each rank holds some of the experts.
    Expert,
    /// Each rank holds a slice of every expert's weight matrices.
    ExpertTensor,
    /// Each rank holds a replica of its part of the model and reads different samples.
    Data,
    /// Each rank holds some of the layers.
    Pipeline,
}

impl Axis {
    /// Every axis.
    pub const ALL: [Axis; 6] = *Self::VARIANTS.as_array().unwrap();

    /// Returns the full name, as used in [`Display`](fmt::Display) and in files.
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

/// The order in which the axes number ranks. The left-most axis varies fastest.
///
/// The default is written `tp-cp-ep-dp-pp`. In the expert grid `tp` stands for expert-tensor, which has no separate
/// name here. An axis of size 1 may be omitted.
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

    /// Returns the named axes. The first axis has stride 1.
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
