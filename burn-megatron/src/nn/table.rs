//! One table per model says how each parameter lies.
//!
//! The layers fill it through [`Scope::parameter`](super::Scope::parameter); the data-parallel
//! wrapper, the gradient norm, the optimizer and `verify` read it, and none keeps its own list.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};

use super::{Place, Placement};

/// What is known of one parameter, on every rank the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ParameterEntry {
    /// Its path in the module, such as `blocks.0.mlp.up.weight`.
    pub path: String,
    /// The shape of the whole parameter, without padding.
    pub shape: Vec<usize>,
    /// How the ranks of the tensor axis share it.
    pub placement: Placement,
    /// Whether the gradients of the tensor axis are parts of a sum. So it is for a replicated
    /// parameter of which each rank sees a part of the sequence.
    pub partial_gradient: bool,
    /// Whether the optimizer's weight decay applies to it.
    pub decay: bool,
    /// Whether the first and the last rank of the pipeline both hold it (a tied embedding): their
    /// gradients are parts of a sum, and it counts once, on the first.
    pub at_both_ends: bool,
    /// The stage of the pipeline that it belongs to; 0 where the model is not cut.
    pub stage: usize,
}

impl ParameterEntry {
    /// The shape of the part at `place`.
    pub fn local_shape(&self, place: Place) -> Vec<usize> {
        self.placement.local_shape(&self.shape, place)
    }

    /// The number of elements of the whole parameter.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The parameters of one model, in the order in which Burn's module visitors meet them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ParameterTable {
    entries: Vec<ParameterEntry>,
}

/// A table that does not fit its module.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The module has parameters that no layer declared.
    #[error("no placement was declared for {}", .0.join(", "))]
    Undeclared(Vec<String>),
    /// Parameters were declared that the module has not.
    #[error("declared, but not in the module: {}", .0.join(", "))]
    Missing(Vec<String>),
    /// A path was declared twice.
    #[error("{0} was declared twice: two layers share the path of one scope")]
    Twice(String),
    /// A parameter has another shape than was declared.
    #[error("{path} has the shape {found:?}; what was declared gives {declared:?} on this rank")]
    Shape {
        /// The parameter.
        path: String,
        /// Its shape in the module.
        found: Vec<usize>,
        /// The shape that follows from its entry.
        declared: Vec<usize>,
    },
}

impl ParameterTable {
    /// The table of `module` from what its layers declared.
    ///
    /// # Errors
    ///
    /// [`TableError`] when a parameter was declared not at all, twice, in vain or otherwise.
    pub fn new<M: Module>(
        module: &M,
        declared: Vec<ParameterEntry>,
        place: Place,
    ) -> Result<Self, TableError> {
        Self::of_part(module, declared, place, |path| path)
    }

    /// The table of a part of a model. `rename` turns a path in `module` into the one that the
    /// parameter has in the whole model.
    ///
    /// # Errors
    ///
    /// See [`new`](Self::new).
    pub fn of_part<M: Module>(
        module: &M,
        declared: Vec<ParameterEntry>,
        place: Place,
        rename: impl Fn(String) -> String,
    ) -> Result<Self, TableError> {
        let mut by_path = BTreeMap::new();
        for entry in declared {
            if let Some(entry) = by_path.insert(entry.path.clone(), entry) {
                return Err(TableError::Twice(entry.path));
            }
        }
        let found = shapes(module);
        let found: Vec<_> = found
            .into_iter()
            .map(|(path, shape)| (rename(path), shape))
            .collect();
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
                return Err(TableError::Twice(path));
            };
            let declared = entry.local_shape(place);
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

    /// The table of a module that is the same on every rank, such as one of burn-nn's.
    ///
    /// Weight decay applies to parameters of two and more dimensions.
    pub fn replicated<M: Module>(module: &M) -> Self {
        let entry = |(path, shape): (String, Vec<usize>)| ParameterEntry {
            decay: shape.len() > 1,
            path,
            shape,
            placement: Placement::Replicated,
            partial_gradient: false,
            at_both_ends: false,
            stage: 0,
        };
        Self {
            entries: shapes(module).into_iter().map(entry).collect(),
        }
    }

    /// The entries, in the order of the module.
    pub fn entries(&self) -> &[ParameterEntry] {
        &self.entries
    }

    /// The entries, to be changed: for a model that knows better than its layers.
    pub fn entries_mut(&mut self) -> &mut [ParameterEntry] {
        &mut self.entries
    }

    /// The index of a path.
    pub fn index(&self, path: &str) -> Option<usize> {
        self.entries.iter().position(|entry| entry.path == path)
    }

    /// The number of elements of the whole model, each parameter counted once.
    pub fn num_elements(&self) -> usize {
        self.entries.iter().map(ParameterEntry::len).sum()
    }

    /// The number of elements that the rank at `place` holds.
    pub fn local_elements(&self, place: Place) -> usize {
        let local = |entry: &ParameterEntry| entry.local_shape(place).iter().product::<usize>();
        self.entries.iter().map(local).sum()
    }
}

/// Path and shape of each float parameter.
fn shapes<M: Module>(module: &M) -> Vec<(String, Vec<usize>)> {
    let mut visitor = Shapes::default();
    module.visit(&mut visitor);
    visitor.found
}

#[derive(Default)]
struct Shapes {
    path: Vec<String>,
    found: Vec<(String, Vec<usize>)>,
}

impl ModuleVisitor for Shapes {
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
