-- The two parties of a run, as groups: whoever logs in is made a member of one (GRANT sluice_actor TO somebody).
DO $$
BEGIN
    IF to_regrole('sluice_learner') IS NULL THEN CREATE ROLE sluice_learner NOLOGIN; END IF;
    IF to_regrole('sluice_actor') IS NULL THEN CREATE ROLE sluice_actor NOLOGIN; END IF;
    -- Not for a superuser: it may do all of it anyway.
    IF NOT pg_has_role(current_user, 'sluice_learner', 'MEMBER') THEN
        EXECUTE format('GRANT sluice_learner TO %I', current_user);
    END IF;
END $$;
