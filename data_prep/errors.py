"""The one error of data preparation that is meant for a person."""


class DataError(Exception):
    """Data, a file or a setting is not as it must be; the message names it, the values and the mend."""
