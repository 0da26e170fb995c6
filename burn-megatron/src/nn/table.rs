//! The parameter table of a model: the shape, placement and gradient reduction of each parameter.
//!
//! The layers add entries to the table with [`ModelBuilder::parameter`](super::ModelBuilder::parameter). The
//! data-parallel wrapper, the gradient norm, the optimizer and `verify` read the table.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::ParameterEntry;
use crate::mesh::MeshRank;

/// The parameter table of one model. It has one entry per parameter, in the order in which Burn's module visitors visit
/// the parameters.
///
/// ```
/// use burn::nn::LinearConfig;
/// use burn::tensor::Device;
/// use burn_megatron::data_parallel::freeze;
/// use burn_megatron::nn::ParameterTable;
///
/// let linear = LinearConfig::new(4, 2).init(&Device::flex());
/// let mut table = ParameterTable::replicated(&linear);
/// assert_eq!(table.index("bias"), Some(1));
/// let unmatched = freeze(&mut table, &["bias".into()])?;
/// assert!(unmatched.is_empty());
/// assert_eq!(table.filtered(false).num_elements(), 4 * 2);
/// # Ok::<(), burn_megatron::data_parallel::DataParallelError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParameterTable {
    entries: Vec<ParameterEntry>,
}

/// The error for a parameter table that does not match its module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The module has parameters that no layer declared.
    #[error("no placement was declared for {}", .0.join(", "))]
    Undeclared(Vec<String>),
    /// Declared parameters are not in the module.
    #[error("declared, but not in the module: {}", .0.join(", "))]
    Missing(Vec<String>),
    /// A path was declared twice.
    #[error("{0} was declared twice: two layers share the path of one builder")]
    Duplicate(String),
    /// A declaration is inconsistent or does not fit the mesh.
    #[error("{path}: {reason}")]
    Invalid {
        /// The path of the parameter.
        path: String,
        /// The reason, with the given value and the expected value.
        reason: String,
    },
    /// The shape of a parameter differs from its declaration.
    #[error("{path} has the shape {found:?}, expected {declared:?} on this rank")]
    Shape {
        /// The path of the parameter.
        path: String,
        /// The shape of the parameter in the module.
        found: Vec<usize>,
        /// The local shape according to the declaration of the parameter.
        declared: Vec<usize>,
    },
}

impl ParameterTable {
    /// Builds the table of `module` from the declarations of its layers.
    ///
    /// # Errors
    ///
    /// [`TableError`] in these cases:
    ///
    /// - a parameter of the module was not declared, or was declared twice;
    /// - a declared parameter is not in the module;
    /// - the declared shape differs from the shape of the parameter;
    /// - a declaration is [inconsistent](ParameterEntry::check).
    pub fn new<M: Module>(
        module: &M,
        declared: Vec<ParameterEntry>,
        rank: &MeshRank,
    ) -> Result<Self, TableError> {
        let mut by_path = BTreeMap::new();
        for entry in declared {
            entry.check(rank.mesh())?;
            if let Some(entry) = by_path.insert(entry.path.clone(), entry) {
                return Err(TableError::Duplicate(entry.path));
            }
        }
        let found = shapes(module);
        let paths: BTreeSet<_> = found.iter().map(|(path, _)| path).collect();
        let missing: Vec<_> = by_path
            .keys()
            .filter(|path| !paths.contains(path))
            .cloned()
            .collect();
        if !missing.is_empty() {
            return Err(TableError::Missing(missing));
        }
        let undeclared: Vec<_> = found
            .iter()
            .filter(|(path, _)| !by_path.contains_key(path))
            .map(|(path, _)| path.clone())
            .collect();
        if !undeclared.is_empty() {
            return Err(TableError::Undeclared(undeclared));
        }
        let mut entries = Vec::with_capacity(found.len());
        for (path, shape) in found {
            let Some(entry) = by_path.remove(&path) else {
                return Err(TableError::Duplicate(path));
            };
            let declared = entry.local_shape(rank);
            if declared != shape {
                return Err(TableError::Shape {
                    path,
                    found: shape,
                    declared,
                });
            }
            entries.push(entry);
        }
        Ok(Self { entries })
    }

    /// Builds the table of a module that is replicated on every rank, such as a burn-nn module.
    ///
    /// Weight decay applies to parameters with two or more dimensions.
    pub fn replicated<M: Module>(module: &M) -> Self {
        let entry = |(path, shape): (String, _)| ParameterEntry::replicated(path, shape);
        Self {
            entries: shapes(module).into_iter().map(entry).collect(),
        }
    }

    /// Returns the entries, in module order.
    pub fn entries(&self) -> &[ParameterEntry] {
        &self.entries
    }

    /// Returns the entries for modification, for a model that overrides the declarations of its layers.
    pub fn entries_mut(&mut self) -> &mut [ParameterEntry] {
        &mut self.entries
    }

    /// Returns the table of the [frozen](ParameterEntry::frozen) parameters if `frozen` is true. Otherwise returns the
    /// table of the parameters that are not frozen.
    pub fn filtered(&self, frozen: bool) -> Self {
        let own = |entry: &&ParameterEntry| entry.frozen == frozen;
        Self {
            entries: self.entries.iter().filter(own).cloned().collect(),
        }
    }

    /// Returns the index of the parameter with this path, or `None` if the table has no such parameter.
    pub fn index(&self, path: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.path == path)
    }

    /// Returns the total number of elements of the parameters in the table. The full size of each parameter is counted
    /// once.
    pub fn num_elements(&self) -> usize {
        self.entries.iter().map(ParameterEntry::len).sum()
    }

    /// Returns the number of parameter elements that `rank` holds.
    pub fn local_elements(&self, rank: &MeshRank) -> usize {
        let local = |entry: &ParameterEntry| entry.local_shape(rank).iter().product::<usize>();
        self.entries.iter().map(local).sum()
    }
}

/// Returns the path and shape of each float parameter.
fn shapes<M: Module>(module: &M) -> Vec<(String, Vec<usize>)> {
    let mut visitor = ShapeVisitor::default();
    module.visit(&mut visitor);
    visitor.found
}

#[derive(Default)]
struct ShapeVisitor {
    path: Vec<String>,
    found: Vec<(String, Vec<usize>)>,
}

impl ModuleVisitor for ShapeVisitor {
    fn enter_module(&mut self, name: &str, _container_type: &str) {
        self.path.push(name.to_string());
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found
            .push((self.path.join("."), param.lazy_shape().to_vec()));
    }
}
