//! The split of a file into documents.

use super::error::PositionUnit;
use super::table::TableFormat;

/// Split of a file into documents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DocumentFormat {
    /// The whole file is one document.
    Whole,
    /// Documents end with these bytes.
    Separated(Vec<u8>),
    /// Every line is a document.
    Lines,
    /// Every line is a JSON object.
    Json,
    /// Every row of a table is a document.
    Table(TableFormat),
}

impl DocumentFormat {
    /// Returns the unit of the number of a document.
    pub fn unit(&self) -> PositionUnit {
        match self {
            Self::Whole => PositionUnit::File,
            Self::Separated(_) => PositionUnit::Document,
            Self::Lines | Self::Json => PositionUnit::Line,
            Self::Table(_) => PositionUnit::Row,
        }
    }

    /// Returns whether documents are records with texts under keys.
    pub fn has_keys(&self) -> bool {
        matches!(self, Self::Json | Self::Table(_))
    }
}
